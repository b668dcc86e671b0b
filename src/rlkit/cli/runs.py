"""`rlkit doctor`, `rlkit audit` and `rlkit records`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rlkit.cli.common.guard import FAILED, MISSING
from rlkit.cli.common.options import OptionalRun, RunName
from rlkit.cli.common.output import Data, Output
from rlkit.errors import UsageError

_SUBJECT_CHARS = 18

_STATUS_PHRASES = {
    "completed": "is complete at step",
    "interrupted": "was interrupted after step",
    "budget": "reached its budget after step",
    "failed": "failed after step",
    "running": "is running and has finished step",
    "killed": "was killed after step",
}
"""Phrases by status of a run; the number of the last step follows."""


def doctor(
    output: Output,
    run: OptionalRun = None,
    *,
    no_engine: Annotated[bool, typer.Option("--no-engine", help="Skip the test of the embedded engine.")] = False,
) -> int:
    """Diagnose this machine, or a run.

    Each finding shows its fix. The exit code is 3 if this machine lacks a requirement.
    """
    if run is not None:
        if no_engine:
            raise UsageError("--no-engine has no effect on a run: leave it out")
        _examine_run(output, run)
        return 0
    from rlkit.tools.doctor import Finding, examine_machine

    findings: list[Finding] = []
    for finding in examine_machine(engine=not no_engine, note=output.note):
        findings.append(finding)
        if not output.json:
            output.line(f"{finding.status:6}{finding.subject:{_SUBJECT_CHARS}}  {finding.detail}".rstrip())
            if finding.fix:
                output.line(f"{'':{6 + _SUBJECT_CHARS}}  fix: {finding.fix}")
    is_ok = all(finding.status != "fail" for finding in findings)
    if output.json:
        output.data({"ok": is_ok, "findings": [asdict(finding) for finding in findings]})
    return 0 if is_ok else MISSING


def _examine_run(output: Output, run: str) -> None:
    from rlkit.tools.doctor import examine_run

    directory, step, ending, findings = examine_run(run)
    name = directory.name
    lines: list[str] = []
    if ending is not None:
        lines.append(f"{name} {_STATUS_PHRASES[ending.status]} {step}: {ending}")
    if ending is not None and ending.action:
        lines.append(f"  fix: {ending.action}")
    lines.append(f"{name} at step {step}: {len(findings) or 'no'} finding{'s' * (len(findings) != 1)}")
    for finding in findings:
        where = "" if finding.env == "all" else f" in {finding.env}"
        lines.append(f"{finding.name}{where}, first found in step {finding.first}, last in step {finding.last}")
        lines += [f"  {finding.evidence}", f"  fix: {finding.action}"]
    output.result(
        {
            "run": name,
            "directory": str(directory),
            "step": step,
            "ending": ending and asdict(ending),
            "findings": [asdict(finding) for finding in findings],
        },
        "\n".join(lines),
    )


def audit(output: Output, run: RunName) -> int:
    """Compare a run's trained tokens with its sampled tokens.

    The exit code is 1 on a mismatch.
    """
    from rlkit._util import threads
    from rlkit.tools.audit import audit_run

    directory, audits = threads.run(audit_run(run))
    mismatch = "; ".join(audit.mismatch for audit in audits.values() if audit.mismatch is not None) or None
    summaries = [f"{env}: {audit}" for env, audit in audits.items() if audit.mismatch is None]
    if output.json:
        envs = {env: asdict(audit) for env, audit in audits.items()}
        output.data({"run": directory.name, "ok": mismatch is None, "mismatch": mismatch, "envs": envs})
    else:
        for line in summaries if audits else [f"{directory.name} has not finished a step"]:
            output.line(line)
        if mismatch is not None:
            output.error(mismatch)
    return 0 if mismatch is None else FAILED


def records(
    output: Output,
    run: RunName,
    *,
    best: Annotated[int, typer.Option(min=1, help="Number of best records to show per search.")] = 3,
    no_draw: Annotated[bool, typer.Option("--no-draw", help="Skip the pictures.")] = False,
) -> None:
    """List and draw the best constructions of a `discovery` run.

    Each entry shows its proven properties. The pictures are PNG files in the run's folder, beside the records.
    """
    from rlkit.envs.discovery.best import best_records

    directory, searches = best_records(run, best=best, draw=not no_draw, note=output.note)
    envs, lines = dict[str, Data](), list[str]()
    for env, search in searches.items():
        pairs = list(zip(search.records, search.pictures, strict=True))
        envs[env] = [{**record.to_json(), "picture": picture and str(picture)} for record, picture in pairs]
        if not pairs:
            lines.append(f"{env}: no records: no construction improves on the initial ones")
        for rank, (record, picture) in enumerate(pairs, 1):
            lines += [f"{env} {rank}: {record}", *([f"    drawn in {picture}"] if picture else [])]
        if search.known_results:
            lines.append(f"{env}, for comparison: {search.known_results}")
    known_results = {env: search.known_results for env, search in searches.items()}
    output.result({"run": directory.name, "records": envs, "known_results": known_results}, "\n".join(lines))
