"""`rlkit doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rlkit.cli.common.arguments import run_directory
from rlkit.cli.common.guard import MISSING
from rlkit.cli.common.output import Output

if TYPE_CHECKING:
    from rlkit.tools.doctor import Finding

SUBJECT_CHARS = 18

_WAYS = {
    "completed": "is complete at step",
    "interrupted": "was interrupted after step",
    "budget": "ended with its budget after step",
    "failed": "failed after step",
    "running": "runs and has finished step",
    "killed": "was killed after step",
}
"""Words for the end of a run; the number of its last step follows them."""


def examine_machine(output: Output, *, engine: bool) -> int:
    """Examine the machine, and print a line a finding. Returns the exit code."""
    from rlkit.tools.doctor import examine

    findings: list[Finding] = []
    for finding in examine(engine=engine, say=output.note):
        findings.append(finding)
        if not output.json:
            output.line(line(finding))
    good = all(finding.status != "fail" for finding in findings)
    if output.json:
        output.data({"ok": good, "findings": [asdict(finding) for finding in findings]})
    return 0 if good else MISSING


def examine_run(run: str, output: Output) -> int:
    """Print how a run ended and what is wrong with it, a finding after the other. Returns the exit code."""
    from rlkit.metrics.diagnostics import findings
    from rlkit.store import lines
    from rlkit.store.blocking_findings import recorded_findings
    from rlkit.store.ending import read_ending

    directory = run_directory(run)
    measured = lines.numbers(directory / "metrics.jsonl")
    found = findings(measured) + recorded_findings(directory)
    last, ending = measured[-1][0] if measured else 0, read_ending(directory)
    if output.json:
        every, ended = [asdict(finding) for finding in found], ending and asdict(ending)
        known = {"run": directory.name, "directory": str(directory), "step": last}
        output.data({**known, "ending": ended, "findings": every})
        return 0
    if ending is not None:
        output.line(f"{directory.name} {_WAYS[ending.way]} {last}: {ending}")
    if ending is not None and ending.action:
        output.line(f"  fix: {ending.action}")
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
