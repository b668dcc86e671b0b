"""`rlkit doctor`, `rlkit audit` and `rlkit records`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rlkit.cli.common.guard import MISSING
from rlkit.cli.common.options import OptionalRun, RunName
from rlkit.cli.common.output import Data, Output
from rlkit.errors import UsageError

_SUBJECT_CHARS = 18

_WAYS = {
    "completed": "is complete at step",
    "interrupted": "was interrupted after step",
    "budget": "ended with its budget after step",
    "failed": "failed after step",
    "running": "runs and has finished step",
    "killed": "was killed after step",
}
"""Words for the end of a run; the number of its last step follows them."""


def doctor(
    output: Output,
    run: OptionalRun = None,
    *,
    no_engine: Annotated[bool, typer.Option("--no-engine", help="Do not try the embedded engine.")] = False,
) -> int:
    """Find what is wrong with this machine, or with a run.

    Each thing comes with its fix. Exit code 3 if something that the machine needs is missing.
    """
    if run is not None:
        if no_engine:
            raise UsageError("--no-engine has no effect on a run: leave it out")
        return _examine_run(output, run)
    from rlkit.tools.doctor import Finding, examine_machine

    findings: list[Finding] = []
    for finding in examine_machine(engine=not no_engine, say=output.note):
        findings.append(finding)
        if not output.json:
            output.line(f"{finding.status:6}{finding.subject:{_SUBJECT_CHARS}}  {finding.detail}".rstrip())
            if finding.fix:
                output.line(f"{'':{6 + _SUBJECT_CHARS}}  fix: {finding.fix}")
    good = all(finding.status != "fail" for finding in findings)
    if output.json:
        output.data({"ok": good, "findings": [asdict(finding) for finding in findings]})
    return 0 if good else MISSING


def _examine_run(output: Output, run: str) -> int:
    """Print how a run ended and what is wrong with it, a finding after the other."""
    from rlkit.tools.doctor import examine_run

    directory, step, ending, found = examine_run(run)
    name = directory.name
    lines: list[str] = []
    if ending is not None:
        lines.append(f"{name} {_WAYS[ending.way]} {step}: {ending}")
    if ending is not None and ending.action:
        lines.append(f"  fix: {ending.action}")
    lines.append(f"{name} at step {step}: {len(found) or 'no'} finding{'s' * (len(found) != 1)}")
    for finding in found:
        where = "" if finding.env == "all" else f" in {finding.env}"
        lines.append(f"{finding.name}{where}, found in step {finding.first}, last in step {finding.last}")
        lines += [f"  {finding.evidence}", f"  fix: {finding.action}"]
    output.result(
        {
            "run": name,
            "directory": str(directory),
            "step": step,
            "ending": ending and asdict(ending),
            "findings": [asdict(finding) for finding in found],
        },
        "\n".join(lines),
    )
    return 0


def audit(output: Output, run: RunName) -> int:
    """Check that a run trains on the tokens that were sampled.

    Exit code 1 if one of them is not where it was sampled.
    """
    from rlkit._util import threads
    from rlkit.tools.audit import audit_run

    directory, audits = threads.run(audit_run(run))
    wrong = "; ".join(audit.mismatch for audit in audits.values() if audit.mismatch is not None) or None
    good = [f"{env}: {audit}" for env, audit in audits.items() if audit.mismatch is None]
    if output.json:
        envs = {env: asdict(audit) for env, audit in audits.items()}
        output.data({"run": directory.name, "ok": wrong is None, "mismatch": wrong, "envs": envs})
    else:
        for line in good if audits else [f"{directory.name} has not finished a step"]:
            output.line(line)
        if wrong is not None:
            output.error(wrong)
    return 0 if wrong is None else 1


def records(
    output: Output,
    run: RunName,
    *,
    best: Annotated[int, typer.Option(min=1, help="How many of each search, the best first.")] = 3,
    no_draw: Annotated[bool, typer.Option("--no-draw", help="Draw no pictures.")] = False,
) -> int:
    """List the best constructions of a search, and draw them.

    Each comes with what is proven of it. The pictures are PNG files beside the records, in the run's folder.
    """
    from rlkit.envs.discovery.best import best_records

    directory, searches = best_records(run, best=best, draw=not no_draw, note=output.note)
    found, lines = dict[str, Data](), list[str]()
    for env, search in searches.items():
        drawn = list(zip(search.records, search.pictures, strict=True))
        found[env] = [{**record.to_json(), "picture": picture and str(picture)} for record, picture in drawn]
        if not drawn:
            lines.append(f"{env}: no records: nothing is better than what it began with")
        for place, (record, picture) in enumerate(drawn, 1):
            lines += [f"{env} {place}: {record}", *([f"    drawn in {picture}"] if picture else [])]
        if search.known:
            lines.append(f"{env}, for comparison: {search.known}")
    known = {env: search.known for env, search in searches.items()}
    output.result({"run": directory.name, "records": found, "known": known}, "\n".join(lines))
    return 0
