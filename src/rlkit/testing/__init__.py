"""What rlkit's own tests use, for the tests of those who build on it: policies, small models, a service and a clock.

model = rlkit.testing.byte_model(tmp_path / "model")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.testing.clock import Deadlock, VirtualClock, run_virtual
    from rlkit.testing.models import byte_model, tiny_model
    from rlkit.testing.policies import ByteChat, NoisyPolicy, ScriptedPolicy, ScriptedSampler
    from rlkit.testing.proxy import FaultyProxy
    from rlkit.testing.simulated import SimulatedClient, SimulatedTinker
    from rlkit.testing.world import Fault, Latency, World

__all__ = [
    "ByteChat",
    "Deadlock",
    "Fault",
    "FaultyProxy",
    "Latency",
    "NoisyPolicy",
    "ScriptedPolicy",
    "ScriptedSampler",
    "SimulatedClient",
    "SimulatedTinker",
    "VirtualClock",
    "World",
    "byte_model",
    "run_virtual",
    "tiny_model",
]

_HOME = {
    "ByteChat": "rlkit.testing.policies",
    "Deadlock": "rlkit.testing.clock",
    "Fault": "rlkit.testing.world",
    "FaultyProxy": "rlkit.testing.proxy",
    "Latency": "rlkit.testing.world",
    "NoisyPolicy": "rlkit.testing.policies",
    "ScriptedPolicy": "rlkit.testing.policies",
    "ScriptedSampler": "rlkit.testing.policies",
    "SimulatedClient": "rlkit.testing.simulated",
    "SimulatedTinker": "rlkit.testing.simulated",
    "VirtualClock": "rlkit.testing.clock",
    "World": "rlkit.testing.world",
    "byte_model": "rlkit.testing.models",
    "run_virtual": "rlkit.testing.clock",
    "tiny_model": "rlkit.testing.models",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
