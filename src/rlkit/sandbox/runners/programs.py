"""A model's programs, their limits, results and isolation.

Invariant: the result of a program is numbers and text. It is never unpickled, evaluated, or trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rlkit.errors import MissingError
from rlkit.sandbox.spec import MIB

type Level = Literal["none", "limits", "os"]
"""Isolation of a program from the machine: none, resource limits, or protection by the kernel."""

type Layer = Literal[
    "environment", "session", "namespaces", "limits", "capabilities", "no_new_privs", "landlock", "seccomp"
]
LAYERS: tuple[Layer, ...] = get_args(Layer.__value__)
"""All isolation layers, in the order in which they are applied."""

LEVELS: tuple[Level, ...] = get_args(Level.__value__)
_LIMITS_LAYERS = frozenset({"environment", "session", "limits"})
_OS_LAYERS = _LIMITS_LAYERS | {"capabilities", "no_new_privs", "landlock", "seccomp"}

type Arrays = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A program to run.

    Args:
        source: Python source code.
        entry: name of the function to call; its return value is the result, or the first of a tuple of results.
        arguments: keyword arguments for the function; arguments that it does not accept are dropped.
        arrays: arrays that the program can read as global variables.
        helpers: functions that the program can call as global variables, as `module:function` of installed modules.
    """

    source: str
    entry: str = "run"
    arguments: Mapping[str, float] = field(default_factory=dict[str, float])
    arrays: Arrays = field(default_factory=dict[str, NDArray[np.float64]])
    helpers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one program.

    Args:
        timeout_s: wall-clock seconds since its start.
        memory_bytes: address space in addition to that of the loaded libraries.
        cpus: processors that it may use; its processor time is limited to `timeout_s · cpus`.
        result_bytes: size of the returned numbers.
    """

    timeout_s: float = 60.0
    memory_bytes: int = 2048 * MIB
    cpus: int = 1
    result_bytes: int = 16 * MIB


type ProgramOutcome = Literal["value", "error", "timeout", "memory", "killed", "too large"]
"""Outcome of a program: numbers, an exception, its time limit, out of memory, a signal, or too many numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class ProgramResult:
    """The result of a program.

    Args:
        value: the returned numbers, if the outcome is `value`.
        error: end of the traceback, or a one-line reason; empty if the outcome is `value`.
        stdout: end of its output.
    """

    outcome: ProgramOutcome
    value: NDArray[np.float64] | None
    error: str
    stdout: str
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Isolation:
    """Isolation of programs from the machine: the layers in force, and notes by layer.

    A note is the version of a layer, or the reason why the layer is not in force.
    """

    layers: tuple[str, ...]
    notes: Mapping[str, str]

    @property
    def level(self) -> Level:
        """Level that these layers provide."""
        names = frozenset(self.layers)
        return "os" if names >= _OS_LAYERS else "limits" if names >= _LIMITS_LAYERS else "none"

    def require(self, level: Level) -> None:
        """Raise a MissingError if the isolation is below a level."""
        if LEVELS.index(self.level) < LEVELS.index(level):
            raise MissingError(
                f"programs would run with isolation {self.level!r}, below min_isolation {level!r} ({self}): use Linux "
                "5.13 or later with Landlock and seccomp, run programs on another machine, or lower min_isolation if "
                "you trust them"
            )

    def __str__(self) -> str:
        def join(layers: Iterable[str]) -> str:
            return ", ".join(f"{name} ({self.notes[name]})" if name in self.notes else name for name in layers)

        present, missing = join(self.layers) or "nothing", join(layer for layer in LAYERS if layer not in self.layers)
        return f"{present}; without {missing}" if missing else present
