"""What runs a model's programs, whatever it is: the protocol, what it is given, and what comes back.

Invariant: what comes back of a program is numbers and text. Nothing of it is ever unpickled, evaluated, or believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from rlkit.errors import MissingError
from rlkit.sandbox.spec import MIB

type Level = Literal["none", "limits", "os"]
"""How far a program is kept from the machine: not at all; by limits on what it uses; by the kernel."""

type Layer = Literal[
    "environment", "session", "namespaces", "limits", "capabilities", "no_new_privs", "landlock", "seccomp"
]
LAYERS: tuple[Layer, ...] = get_args(Layer.__value__)
"""All layers, in the order in which they are put up."""

LEVELS: tuple[Level, ...] = get_args(Level.__value__)
_OF_LIMITS = frozenset({"environment", "session", "limits"})
_OF_OS = _OF_LIMITS | {"capabilities", "no_new_privs", "landlock", "seccomp"}

type Arrays = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A program to run.

    Args:
        source: Python.
        entry: the function in it that is called; what it returns is the result, or the first of a tuple of results.
        arguments: that it is given by name, those of them that it takes.
        arrays: global variables of the program.
        helpers: global variables that are functions, each as `module:function` of an installed module.
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
        timeout_s: wall-clock seconds from its start.
        memory_bytes: address space on top of that of the loaded libraries.
        cpus: threads of its linear algebra; as many are counted for each program that runs.
        result_bytes: size of the numbers that it returns.
    """

    timeout_s: float = 60.0
    memory_bytes: int = 2048 * MIB
    cpus: int = 1
    result_bytes: int = 16 * MIB


type ProgramOutcome = Literal["value", "error", "timeout", "memory", "killed", "too large"]
"""What a program ended with: numbers, an exception, its time limit, no more memory, a signal, or too many numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class ProgramResult:
    """The end of a program.

    Args:
        value: the numbers that it returned, with an outcome of `value`.
        error: otherwise the end of its traceback, or a line that says what happened.
        stdout: the end of what it printed.
    """

    outcome: ProgramOutcome
    value: NDArray[np.float64] | None
    error: str
    stdout: str
    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Isolation:
    """What is between programs and the machine: a level, the layers in force, and notes on layers.

    A note is by layer: its version, or why it is not in force.
    """

    level: Level
    layers: tuple[str, ...]
    notes: Mapping[str, str]

    @classmethod
    def of(cls, layers: tuple[str, ...], notes: Mapping[str, str]) -> Isolation:
        """Return the isolation that these layers make."""
        held = frozenset(layers)
        return cls("os" if held >= _OF_OS else "limits" if held >= _OF_LIMITS else "none", layers, notes)

    def demand(self, least: Level) -> None:
        """Raise a MissingError below a level."""
        if LEVELS.index(self.level) < LEVELS.index(least):
            raise MissingError(
                f"programs would run with isolation {self.level!r}, below min_isolation {least!r} ({self}): use Linux "
                "5.13 or later with Landlock and seccomp, a runner elsewhere, or lower min_isolation if you trust them"
            )

    def __str__(self) -> str:
        def join(layers: Iterable[str]) -> str:
            return ", ".join(f"{name} ({self.notes[name]})" if name in self.notes else name for name in layers)

        held, missing = join(self.layers) or "nothing", join(layer for layer in LAYERS if layer not in self.layers)
        return f"{held}; without {missing}" if missing else held


class CodeRunner(Protocol):
    """Runs programs, as many at once as there is room for.

    ::

        runner = ForkServer()
        ran = await runner.run(Program("def run(seed): return [seed, 2.0]", arguments={"seed": 1}), ProgramLimits())
        assert ran.value.tolist() == [1.0, 2.0]
    """

    async def isolation(self) -> Isolation:
        """What is between programs and the machine; starts what there is to start.

        Raises:
            MissingError: it is less than was asked for.
        """
        ...

    async def run(self, program: Program, limits: ProgramLimits) -> ProgramResult:
        """Run a program to its end, once there is room; what it does wrong is in what comes back.

        Raises:
            MissingError: the isolation is less than was asked for.
            EnvironmentFault: what runs programs failed, which says nothing about the program.
        """
        ...

    def close(self) -> None:
        """End everything that runs."""
        ...
