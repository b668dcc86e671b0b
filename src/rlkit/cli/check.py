"""`rlkit check`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit.cli.common.guard import FAILED
from rlkit.cli.common.options import RedTeam
from rlkit.cli.common.output import Data, Output
from rlkit.cli.common.signals import run_terminable

if TYPE_CHECKING:
    from rlkit.check import Report
    from rlkit.redteam.report import RedTeamReport


def check(
    output: Output,
    target: Annotated[str, typer.Argument(help="Built-in environment, file.py:Name, or configuration file.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Same as --args.", show_default=False)
    ] = None,
    *,
    args: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Argument of the environment, or override of the configuration."),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks to try.")] = 5,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Time limit of a rollout in seconds.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the environment and of the test replies.")] = 0,
    redteam: RedTeam = False,
) -> int:
    """Check an environment for faults.

    The exit code is 1 if a check fails; with --redteam, if a cheat earns more than an honest empty attempt.
    """
    import asyncio  # imported late to keep `--help` fast

    from rlkit.check import check
    from rlkit.config.loading.targets import load_target

    settings = [*(args or []), *(arguments or [])]
    envs = load_target(target, settings, seed=seed, warn=lambda warning: output.note(f"warning: {warning}"))
    if redteam:
        from rlkit.redteam.attack import attack_environment

        note = output.silent if output.json else output.note
        attacks: dict[str, RedTeamReport] = {}
        for name, source in envs.items():
            attack = attack_environment(name, source, tasks=tasks, timeout_s=timeout_s, seed=seed, note=note)
            attacks[name] = run_terminable(attack)
        return print_attacks(output, attacks)
    records, tables, good = dict[str, Data](), list[str](), True
    for name, source in envs.items():
        report = asyncio.run(check(source, tasks=tasks, timeout_s=timeout_s, seed=seed))
        records[name] = {"ok": report.ok, "findings": [asdict(finding) for finding in report.findings]}
        tables.append(f"{name}\n{_table(report)}")
        good = good and report.ok
    output.result({"ok": good, "envs": records}, "\n\n".join(tables))
    return 0 if good else FAILED


def print_attacks(output: Output, reports: dict[str, RedTeamReport]) -> int:
    """Print the rewards of the red team's cheats. The key of a report is its environment, or "" for a task folder."""
    good = all(report.ok for report in reports.values())
    records: dict[str, Data] = {name: report.to_json() for name, report in reports.items()}
    body = reports[""].to_json() if "" in reports else {"envs": records}
    output.result({"ok": good, **body}, "\n\n".join(f"{name}\n{report}".lstrip() for name, report in reports.items()))
    return 0 if good else FAILED


def _table(report: Report) -> str:
    """Return a line such as `passed  determinism  …` for each finding, and a line with the fix if it failed."""
    width = max((len(finding.check) for finding in report.findings), default=0)
    lines: list[str] = []
    for finding in report.findings:
        lines.append(f"  {finding.status:8}{finding.check:{width}}  {finding.detail}".rstrip())
        if finding.status == "failed" and finding.fix:
            lines.append(f"  {'':8}{'':{width}}  fix: {finding.fix}")
    return "\n".join(lines)
