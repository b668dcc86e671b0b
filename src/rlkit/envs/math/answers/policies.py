"""Conventions of equality that mathematics alone does not decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Policies:
    r"""Conventions of a grader; the defaults suit competition mathematics.

    Args:
        unevaluated: `accept` allows `2^{10}` and `1000+24` for `1024`; `reject` requires evaluated arithmetic, for
            tasks that test it. A fraction, a mixed number and `1.5\times 10^8` are literals.
        percent: `either` allows `25`, `25\%` and `0.25` for `25\%`, and `20\%` for `20` and for `0.2`; `strict` reads
            `25\%` as 0.25 only.
        degrees: `either` allows `90`, `90^\circ` and `\frac{\pi}{2}` for `90^\circ`; `strict` allows the angle only.
        base: `digits` allows `52` for `52_8`, since the question gives the base; `value` allows its value, 42.
        logarithm: base of `\log` without one: `ten`, `natural`, or `either`, whichever makes the answers equal.
        vector: `either` allows the point `(1,2)` and the list `[1,2]` for a column or a row of these numbers; `strict`
            requires a matrix for a matrix and a point for a point. A column is never a row; `[[1],[2]]` is a column.
    """

    unevaluated: Literal["accept", "reject"] = "accept"
    percent: Literal["either", "strict"] = "either"
    degrees: Literal["either", "strict"] = "either"
    base: Literal["digits", "value"] = "digits"
    logarithm: Literal["either", "ten", "natural"] = "either"
    vector: Literal["either", "strict"] = "either"


DEFAULT_POLICIES = Policies()
