"""`rlkit doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rlkit.cli.guard import MISSING
from rlkit.cli.output import Output

if TYPE_CHECKING:
    from rlkit.doctor import Finding

SUBJECT_CHARS = 18


def run(output: Output, *, engine: bool) -> int:
    """Examine the machine, and print a line a finding. Returns the exit code."""
    from rlkit.doctor import examine

    findings: list[Finding] = []
    for finding in examine(engine=engine):
        findings.append(finding)
        if not output.json:
            output.line(line(finding))
    good = all(finding.status != "fail" for finding in findings)
    if output.json:
        output.data({"ok": good, "findings": [asdict(finding) for finding in findings]})
    return 0 if good else MISSING


def line(finding: Finding) -> str:
    """`ok    python  3.12.1`, with the fix below it."""
    text = f"{finding.status:6}{finding.subject:{SUBJECT_CHARS}}  {finding.detail}".rstrip()
    return f"{text}\n{'':{6 + SUBJECT_CHARS}}  fix: {finding.fix}" if finding.fix else text
