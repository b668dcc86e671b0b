"""Report of the checks of an environment.

Invariant: a check that does not apply is `skipped`, with a reason.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from rlkit.types import Json

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

    def __str__(self) -> str:
        width = max((len(finding.check) for finding in self.findings), default=0)
        lines: list[str] = []
        for finding in self.findings:
            lines.append(f"  {finding.status:8}{finding.check:{width}}  {finding.detail}".rstrip())
            if finding.fix:
                lines.append(f"  {'':8}{'':{width}}  fix: {finding.fix}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Json]:
        """Return the report as JSON."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}
