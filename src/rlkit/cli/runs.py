"""`rlkit runs`, `rlkit doctor`, `rlkit audit`, `rlkit records` and `rlkit verify`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from rlkit.cli.common.guard import FAILED, MISSING
from rlkit.cli.common.options import OptionalRun, RunName, Yes
from rlkit.cli.common.output import Data, Output
from rlkit.errors import ConfigError, MissingError, UsageError

NoDraw = Annotated[bool, typer.Option("--no-draw", help="Skip the pictures.")]

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


_AGES = (("d", 86400.0), ("h", 3600.0), ("min", 60.0))  # units of an age, in seconds


def list_all(output: Output) -> None:
    """List the runs on this machine, the newest first."""
    from rlkit.view.library import Library

    summaries = Library.find([]).summaries()
    rows: list[dict[str, Data]] = summaries["runs"]
    lines = [_render_run(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    output.result(rows, text or f"there are no runs in {summaries['folder']}")


def remove(
    output: Output,
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Run names, or run folders.")],
    *,
    yes: Yes = False,
) -> int:
    """Delete the folders of runs permanently. Their checkpoints stay on the service."""
    from rlkit.tools.runs import find_idle_runs, remove_run

    folders = find_idle_runs(runs)
    if not yes and not output.confirm(f"delete {', '.join(map(str, folders))}, permanently?"):
        output.note("nothing was deleted")
        return 0
    for folder in folders:
        remove_run(folder)
    removed = [str(folder) for folder in folders]
    output.result({"removed": removed}, "\n".join(f"removed {folder}" for folder in removed))
    return 0


def rename(
    output: Output, run: RunName, name: Annotated[str, typer.Argument(metavar="NAME", help="New name of the run.")]
) -> None:
    """Rename a run and its folder."""
    from rlkit.tools.runs import rename_run

    folder = rename_run(run, name)
    output.result({"run": folder.name, "directory": str(folder)}, f"renamed to {folder}")


def _render_run(row: Mapping[str, Any]) -> list[str]:
    """Return the name, the status, the steps, the reward and the age of a run."""
    from rlkit.trackers.rendering import render_gain

    steps = f"step {row.get('step', 0)}" + (f"/{row['steps']}" if row.get("steps") else "")
    rewards = [reward for reward in row.get("reward") or () if reward is not None]
    now = time.time()
    seconds = max(now - (row.get("started") or row.get("updated") or now), 0)  # clocks of machines differ
    amount, unit = next(((seconds / length, unit) for unit, length in _AGES if seconds >= length), (seconds, "s"))
    return [
        row["name"],
        row["status"] or "",
        steps,
        render_gain(rewards) if rewards else "",
        f"{amount:.0f} {unit} ago",
    ]


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
    from rlkit.metrics.diagnostics import ENOUGH
    from rlkit.tools.doctor import examine_run

    directory, step, ending, findings = examine_run(run)
    name = directory.name
    lines: list[str] = []
    if ending is not None:
        lines.append(f"{name} {_STATUS_PHRASES[ending.status]} {step}: {ending}")
    if ending is not None and ending.action:
        lines.append(f"  fix: {ending.action}")
    if findings or ending is None or ending.status != "failed":
        few = f" (less certain with fewer than {ENOUGH} steps)" if step < ENOUGH else ""
        lines.append(f"{name} at step {step}: {len(findings) or 'no'} finding{'s' * (len(findings) != 1)}{few}")
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
    envs = {env: asdict(audit) for env, audit in audits.items()}
    record = {"run": directory.name, "ok": mismatch is None, "mismatch": mismatch, "envs": envs}
    if summaries or mismatch is None or output.json:
        output.result(record, "\n".join(summaries) or f"{directory.name} has not finished a step")
    if mismatch is not None and not output.json:
        output.error(mismatch)
    return 0 if mismatch is None else FAILED


def records(
    output: Output,
    run: RunName,
    *,
    best: Annotated[int, typer.Option(min=1, help="Number of best records to show per search.")] = 3,
    no_draw: NoDraw = False,
    export: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the shown records as JSON files.")
    ] = None,
) -> None:
    """List and draw the best constructions of a `discovery` run.

    Each entry shows its proven properties. The pictures are PNG files in the run's folder, beside the records.
    --export writes each construction and its certificate in EinsteinArena's format.
    """
    from rlkit.envs.discovery.best import best_records

    directory, searches = best_records(run, best=best, draw=not no_draw, export=export, note=output.note)
    envs, lines = dict[str, Data](), list[str]()
    for env, search in searches.items():
        envs[env] = [{**record.to_json(), "picture": picture and str(picture)} for record, picture in search.records]
        if not search.records:
            lines.append(f"{env}: no records: no construction improves on the initial ones")
        for rank, (record, picture) in enumerate(search.records, 1):
            lines += [f"{env} {rank}: {record}", *([f"    drawn in {picture}"] if picture else [])]
        if search.known_results:
            lines.append(f"{env}, for comparison: {search.known_results}")
    known_results = {env: search.known_results for env, search in searches.items()}
    output.result({"run": directory.name, "records": envs, "known_results": known_results}, "\n".join(lines))


def verify(
    output: Output,
    problem: Annotated[str, typer.Argument(metavar="PROBLEM", help="Built-in problem, or file.py:Class.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Construction: a JSON, NPY or CSV file.")],
    *,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Option of the problem, such as circles=32.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="PNG file of the drawing; by default FILE.png.")] = None,
    no_draw: NoDraw = False,
) -> int:
    """Verify a construction exactly; compare it with known results.

    The exit code is 1 if the construction is invalid, or if the file claims a wrong value.
    """
    from rlkit.config.loading.load import load_config
    from rlkit.envs.discovery.best import draw_construction
    from rlkit.envs.discovery.verification import verify_witness

    if draw is not None and no_draw:
        raise UsageError("--draw: has no effect with --no-draw; leave it out")
    if draw is not None and not draw.name:
        raise UsageError(f"--draw: {draw} is not a file; give the path of a PNG file")
    for pair in option or []:
        key, equals, _ = pair.partition("=")
        if not (equals and key.isidentifier()):
            raise UsageError(f"--option: {pair!r} is not of the form KEY=VALUE, such as circles=32")
    # Parse KEY=VALUE as in a configuration, by loading one with a single environment, `target`.
    pairs = ["envs.target.env=discovery", *(f"envs.target.args.{pair}" for pair in option or [])]
    try:
        options = load_config([], pairs).config.envs["target"].args
    except ConfigError as error:
        raise ConfigError(str(error).replace("envs.target.args", "options")) from None
    result = verify_witness(problem, file, options=options)
    picture = None if no_draw else draw or file.with_name(f"{file.name}.png")
    try:
        if picture is not None:
            draw_construction(result.problem, result.construction, result.value, picture)
    except (MissingError, OSError) as error:
        output.note(f"not drawn: {error}")
        picture = None
    text = f"{result}" if picture is None else f"{result}\ndrawn in {picture}"
    output.result({**result.to_json(), "picture": picture and str(picture)}, text)
    for name, claim in result.wrong_claims.items():
        output.error(f"{name} claims {claim:.60}, which is wrong: {result.problem.symbol} is {result.decimals}")
    return FAILED if result.wrong_claims else 0
