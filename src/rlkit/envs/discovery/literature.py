"""Published values of problems, from `published/records.json`.

To add a value, append a line to that file with the fields of `PublishedValue`. The table in `docs/discovery.md` has the
same values, in the same order.

Invariant: a withdrawn value never counts.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

PUBLISHED = Path(__file__).with_name("published")
"""Constructions from the literature, as JSON with their sources, and `records.json`."""


class PublishedValue(BaseModel):
    """Published value of a problem.

    Args:
        options: options of the problem to which the value belongs, such as `{"circles": 26}`.
        value: decimal number with all published digits.
        source: page that publishes it.
        by_hand: True if people found it, without a model.
        witness: `public` if the construction can be had; `rounded` if only with fewer digits than the value has.
        verified: arithmetic in which others than its author have checked it.
        file: name of the construction in `published`, without suffix.
        withdrawn: reason for which the value does not count.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    problem: str
    options: dict[str, int | float | str] = {}
    value: Annotated[str, Field(pattern=r"^-?\d+(\.\d+)?$")]
    date: Annotated[str, Field(pattern=r"^\d{4}(-\d\d){0,2}$")]
    who: str
    source: str
    by_hand: bool = False
    witness: Literal["public", "rounded", "private"] = "private"
    verified: Literal["exact", "float", "none"] = "none"
    file: str = ""
    withdrawn: str = ""

    def __str__(self) -> str:
        return f"{self.value} ({self.who}, {self.date})"

    def to_float(self, *, minimise: bool) -> float:
        """Return the nearest float that is not better than the value."""
        value, exact = float(self.value), Fraction(self.value)
        is_better = value < exact if minimise else value > exact
        return math.nextafter(value, math.inf if minimise else -math.inf) if is_better else value


@cache
def read_published() -> tuple[PublishedValue, ...]:
    """Return all published values, withdrawn ones too."""
    content = (PUBLISHED / "records.json").read_bytes()
    return TypeAdapter(tuple[PublishedValue, ...]).validate_json(content)
