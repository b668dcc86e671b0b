"""Results of a conformance suite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlkit.cost.usage import Usage

Status = Literal["works", "deviates", "absent", "skipped"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check.

    Args:
        part: part of the protocol: session, loss, gradient, optimiser, samples, checkpoints or requests.
        status: `absent` if the service rejects the request as unsupported; `skipped` if a precondition is missing.
        detail: the measured number behind the status, or the service's error.
    """

    part: str
    name: str
    status: Status
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """Results of all checks of a service, and what they cost.

    Args:
        usage: requests and tokens of all checks, as a service bills them.
        usd: their price in US dollars; None if unknown.
    """

    url: str
    model: str
    results: Sequence[CheckResult]
    usage: Usage
    usd: float | None

    @property
    def ok(self) -> bool:
        """True if no check deviates. Parts that are absent are no fault."""
        return not any(result.status == "deviates" for result in self.results)

    def count(self, status: Status) -> int:
        """Return the number of checks with a status."""
        return sum(result.status == status for result in self.results)
