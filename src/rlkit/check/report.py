"""Report of the checks of an environment.

Invariant: a check that does not apply is `skipped`, with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

type Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        detail: observation, or the reason why the check does not apply.
        fix: advice for a failed check, else "".
    """

    check: str
    status: Status
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order of the checks."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if no check failed."""
        return not any(finding.status == "failed" for finding in self.findings)
