"""`rlkit doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rlkit.cli.arguments import run_directory
from rlkit.cli.guard import MISSING
from rlkit.cli.output import Output

if TYPE_CHECKING:
    from rlkit.doctor import Finding

SUBJECT_CHARS = 18


def examine_machine(output: Output, *, engine: bool) -> int:
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


def examine_run(run: str, output: Output) -> int:
    """Print what is wrong with a run, a finding after the other. Returns the exit code."""
    from rlkit.findings import findings
    from rlkit.store import lines

    directory = run_directory(run)
    measured = lines.numbers(directory / "metrics.jsonl")
    found = findings(measured)
    last = measured[-1][0] if measured else 0
    if output.json:
        every = [asdict(finding) for finding in found]
        output.data({"run": directory.name, "directory": str(directory), "step": last, "findings": every})
        return 0
    output.line(f"{directory.name} at step {last}: {len(found) or 'no'} finding{'s' * (len(found) != 1)}")
    for one in found:
        where = "" if one.env == "all" else f" in {one.env}"
        output.line(f"{one.name}{where}, found in step {one.first}, last in step {one.last}")
        output.line(f"  {one.evidence}")
        output.line(f"  fix: {one.action}")
    return 0


def line(finding: Finding) -> str:
    """`ok    python  3.12.1`, with the fix below it."""
    text = f"{finding.status:6}{finding.subject:{SUBJECT_CHARS}}  {finding.detail}".rstrip()
    return f"{text}\n{'':{6 + SUBJECT_CHARS}}  fix: {finding.fix}" if finding.fix else text
