"""What rlkit's own tests use, for the tests of those who build on it: policies and small models, offline.

model = rlkit.testing.byte_model(tmp_path / "model")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.testing.models import byte_model, tiny_model
    from rlkit.testing.policies import ByteChat, NoisyPolicy, ScriptedPolicy, ScriptedSampler

__all__ = ["ByteChat", "NoisyPolicy", "ScriptedPolicy", "ScriptedSampler", "byte_model", "tiny_model"]

_HOME = {
    "ByteChat": "rlkit.testing.policies",
    "NoisyPolicy": "rlkit.testing.policies",
    "ScriptedPolicy": "rlkit.testing.policies",
    "ScriptedSampler": "rlkit.testing.policies",
    "byte_model": "rlkit.testing.models",
    "tiny_model": "rlkit.testing.models",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
