"""What counts as the same answer where mathematics alone does not decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Policies:
    r"""Conventions of a grader; the defaults suit competition mathematics.

    Args:
        unevaluated: `accept` takes `2^{10}` and `1000+24` for `1024`; `reject` wants arithmetic on literals to be done,
            for tasks whose whole difficulty it is. A fraction, a mixed number and `1.5\times 10^8` are literals.
        percent: `either` takes `25`, `25\%` and `0.25` for `25\%`, and `20\%` for `20` and for `0.2`; `strict` reads
            `25\%` as a quarter only.
        degrees: `either` takes `90`, `90^\circ` and `\frac{\pi}{2}` for `90^\circ`; `strict` reads it as an angle only.
        base: `digits` takes `52` for `52_8`, since the question names the base; `value` takes 42, which is its value.
        logarithm: what `\log` without a base is: `ten`, `natural`, or `either`, whichever makes the answers equal.
        vector: `either` takes the point `(1,2)` and the list `[1,2]` for a column or a row of these numbers; `strict`
            wants a matrix for a matrix, and none for a point. A column is never a row; `[[1],[2]]` is a column.
    """

    unevaluated: Literal["accept", "reject"] = "accept"
    percent: Literal["either", "strict"] = "either"
    degrees: Literal["either", "strict"] = "either"
    base: Literal["digits", "value"] = "digits"
    logarithm: Literal["either", "ten", "natural"] = "either"
    vector: Literal["either", "strict"] = "either"


DEFAULT = Policies()
