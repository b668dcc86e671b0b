"""Test tools: scripted policies, small models, a simulated service and a virtual clock.

model = rlkit.testing.byte_model(tmp_path / "model")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.testing.clock import DeadlockError, VirtualClock, run_virtual
    from rlkit.testing.models import byte_model, tiny_model
    from rlkit.testing.policies import ByteChat, NoisyPolicy, ScriptedPolicy, ScriptedSampler
    from rlkit.testing.simulated_service import SimulatedClient, SimulatedTinker
    from rlkit.testing.world import Fault, Latency, World

__all__ = [
    "ByteChat",
    "DeadlockError",
    "Fault",
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

_MODULES = {
    "clock": ["DeadlockError", "VirtualClock", "run_virtual"],
    "models": ["byte_model", "tiny_model"],
    "policies": ["ByteChat", "NoisyPolicy", "ScriptedPolicy", "ScriptedSampler"],
    "simulated_service": ["SimulatedClient", "SimulatedTinker"],
    "world": ["Fault", "Latency", "World"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rlkit.testing.{_HOME[name]}"), name)
