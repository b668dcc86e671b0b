"""Verification of constructions in files.

Invariant: a certificate is about exactly the numbers of the file, after the exact normalisation that is stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from decimal import Context, Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from rlkit.envs.discovery import make_problem
from rlkit.envs.discovery.problem import Certificate, Construction, InvalidConstruction, Problem
from rlkit.envs.discovery.problems.exact import format_decimals
from rlkit.envs.discovery.witness import read_witness
from rlkit.types import Json

_FILE_OPTIONS = {"max_points": 100_000, "slack": 1e-6}  # published files have many pieces, or rounded decimals
_MAX_EXACT_BITS = 1 << 24  # limit of all numbers together; exact arithmetic on more takes minutes


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """Verified construction of a file.

    Args:
        construction: the numbers in float64, normalised.
        numbers: number and kind of the numbers in the file.
        exact: proven value, or the value in float64 without a certificate.
        normalisation: changes of the numbers before they were evaluated; empty if there were none.
        claims: values that the file claims, by field.
    """

    problem: Problem
    construction: Construction
    numbers: str
    value: float
    exact: Fraction
    certificate: Certificate | None
    normalisation: str
    claims: Mapping[str, str]

    @property
    def decimals(self) -> str:
        """`exact` in decimals, rounded so that it is not better."""
        return format_decimals(self.exact, places=18, up=self.problem.minimise)

    @property
    def wrong_claims(self) -> dict[str, str]:
        """Claims that differ from the value by a unit of their last digit, at least 1e-12 and at most 1 % of it."""
        with localcontext(Context(prec=60, traps=[])):  # without exceptions; comparisons with NaN are false
            exact, wrong = Decimal(self.exact.numerator) / self.exact.denominator, dict[str, str]()
            for name, claim in self.claims.items():
                exponent = Decimal(claim).as_tuple().exponent
                unit = Decimal(1).scaleb(exponent) if isinstance(exponent, int) else Decimal(0)
                tolerance = max(min(unit, abs(exact) / 100), abs(exact) * Decimal("1e-12"))
                if not abs(Decimal(claim) - exact) < tolerance:
                    wrong[name] = claim
        return wrong

    def compare(self) -> dict[str, list[str]]:
        """Return the published values that the construction beats, equals to their last digit, and misses."""
        comparison: dict[str, list[str]] = {"beats": [], "equals": [], "misses": []}
        for published in self.problem.published:
            gap = self.exact - Fraction(published.value)
            is_equal = abs(gap) < Fraction(1, 10 ** len(published.value.partition(".")[2]))
            relation = "equals" if is_equal else "beats" if (gap < 0) == self.problem.minimise else "misses"
            distance = "" if is_equal else f" by {float(abs(gap)):.3g}"
            comparison[relation].append(f"{published.who} {published.value}{distance}")
        return comparison

    def __str__(self) -> str:
        proof = "none, the value is computed in float64"
        if self.certificate is not None:
            rounding = "up" if self.problem.minimise else "down"
            proof = f"{self.certificate.claim}\nexactly: {self.decimals}, rounded {rounding}"
        lines = [f"{self.problem.symbol} = {self.value:.15g}, {self.numbers}", f"certificate: {proof}"]
        lines.append(f"normalisation: {self.normalisation or 'none'}")
        lines += [f"{relation}: {', '.join(values)}" for relation, values in self.compare().items() if values]
        lines += [f"claimed as {name}: {claim:.60}" for name, claim in self.claims.items()]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Json]:
        """Return the verification as JSON, without the construction."""
        return {
            **{name: getattr(self, name) for name in ("numbers", "value", "normalisation", "claims", "wrong_claims")},
            "ok": not self.wrong_claims,
            "exact": self.decimals,
            "certificate": self.certificate and asdict(self.certificate),
            "published": {**self.compare()},
        }


def verify_witness(
    problem: str | Problem, path: str | Path, *, options: Mapping[str, JsonValue] | None = None
) -> Verification:
    """Verify the construction in a JSON, NPY or CSV file; `docs/discovery.md` describes the formats.

    Args:
        problem: name of a problem, or `package.module:Class` or `file.py:Class` for your own; in Python, an object.
        options: options of the problem. Without them, `max_points` and `slack` allow what published files need.

    Raises:
        UsageError: the problem does not exist, or the file cannot be read.
        InvalidConstruction: the construction breaks a rule.
    """
    chosen = make_problem(problem, dict(options or {}))
    if is_dataclass(chosen):
        names = {field.name for field in fields(chosen)} - {*(options or {})}
        chosen = replace(chosen, **{name: value for name, value in _FILE_OPTIONS.items() if name in names})
    numbers, claims = read_witness(Path(path), key=chosen.key)
    try:
        floats = numbers.astype(np.float64)
    except OverflowError:
        raise InvalidConstruction("an integer is too large for float64") from None
    verified = chosen.verify(floats)
    exact = [Fraction(number) for number in numbers.flat]
    bits = max((max(map(int.bit_length, number.as_integer_ratio())) for number in exact), default=0)
    is_short = bits * len(exact) <= _MAX_EXACT_BITS
    certificate = chosen.certificate(verified.construction, exact if is_short else None)
    if certificate is not None and is_short:
        normalisation = certificate.normalisation
    else:
        pairs = zip(verified.construction.ravel().tolist(), exact, strict=False)
        is_same_shape = verified.construction.shape == numbers.shape
        change = max((abs(Fraction(a) - b) for a, b in pairs), default=0) if is_same_shape else np.inf
        normalisation = f"the verifier changed numbers by up to {change:.3g}" if change else ""
    value = Fraction(certificate.exact if certificate is not None and certificate.exact else verified.value)
    kind = "float64" if any(isinstance(number, float) for number in numbers.flat) else "exact"
    size = f"{'x'.join(map(str, numbers.shape))} {kind} values"
    return Verification(chosen, verified.construction, size, verified.value, value, certificate, normalisation, claims)
