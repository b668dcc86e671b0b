"""One construction that was found, and where it came from.

Invariant: a state that is written and read again is the same, bit for bit.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from rlkit.envs.discovery.problem import Construction, digest
from rlkit.types import Json


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A verified construction.

    Args:
        construction: as its problem normalises it.
        parent: the id of the state that its program was given; None for one that nothing was made from.
        program: that made it; "" where none did.
        stdout: the end of what the program printed.
        polished: whether a local search improved what the program returned.
    """

    construction: Construction
    value: float
    parent: str | None = None
    parent_value: float | None = None
    program: str = ""
    stdout: str = ""
    polished: bool = False

    @property
    def id(self) -> str:
        """The same for equal constructions."""
        return digest(self.construction)

    def to_json(self) -> dict[str, Json]:
        """As JSON, the numbers as the base 64 of little-endian float64."""
        numbers = np.ascontiguousarray(self.construction, "<f8")
        return {
            "construction": base64.b64encode(numbers.tobytes()).decode(),
            "shape": list(numbers.shape),
            "value": self.value,
            "parent": self.parent,
            "parent_value": self.parent_value,
            "program": self.program,
            "stdout": self.stdout,
            "polished": self.polished,
        }

    @classmethod
    def from_json(cls, held: Mapping[str, Json]) -> State:
        """Read what `to_json` wrote."""
        numbers = np.frombuffer(base64.b64decode(str(held["construction"])), "<f8")
        return cls(
            numbers.reshape(cast("Sequence[int]", held["shape"])).astype(np.float64),
            float(cast("float", held["value"])),
            cast("str | None", held["parent"]),
            cast("float | None", held["parent_value"]),
            str(held["program"]),
            str(held["stdout"]),
            bool(held["polished"]),
        )
