"""State that a search can start from: a verified construction with its origin.

Invariant: writing and reading a state preserves it bit for bit.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import cast

import numpy as np

from rlkit.envs.discovery.problem import Construction, VerifiedConstruction, hash_construction
from rlkit.types import Json


@dataclass(frozen=True, slots=True, eq=False)
class State(VerifiedConstruction):
    """Verified construction with its origin.

    Args:
        construction: array, normalised by the problem.
        parent: id of the state from which the program started; None if no program made the construction.
        program: program that made the construction; empty if no program did.
        stdout: end of the program's output.
        polished: True if a local search improved the program's result.
    """

    parent: str | None = None
    parent_value: float | None = None
    program: str = ""
    stdout: str = ""
    polished: bool = False

    @property
    def id(self) -> str:
        """Hash of the construction."""
        return hash_construction(self.construction)

    def to_json(self) -> dict[str, Json]:
        """Return the state as JSON, the numbers as base 64 of little-endian float64."""
        numbers = np.ascontiguousarray(self.construction, "<f8")
        encoded = base64.b64encode(numbers.tobytes()).decode()
        return {**asdict(self), "construction": encoded, "shape": list(numbers.shape)}

    @classmethod
    def from_json(cls, content: Mapping[str, Json]) -> State:
        """Return the state that `to_json` wrote."""
        return cls(decode_construction(content), *[content[item.name] for item in fields(cls)[1:]])  # pyright: ignore[reportArgumentType]  as `to_json` wrote them


def decode_construction(content: Mapping[str, Json]) -> Construction:
    """Return the construction of a state that `State.to_json` wrote."""
    numbers = np.frombuffer(base64.b64decode(str(content["construction"])), "<f8")
    return numbers.reshape(cast("Sequence[int]", content["shape"])).astype(np.float64)
