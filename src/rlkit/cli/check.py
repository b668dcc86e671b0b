"""`rlkit check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from rlkit.cli.common.guard import FAILED
from rlkit.cli.common.options import RedTeam
from rlkit.cli.common.output import Data, Output
from rlkit.cli.common.signals import run_terminable

if TYPE_CHECKING:
    from rlkit.check import Report
    from rlkit.conformance import ServiceReport
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

    The exit code is 1 if a check fails. With --redteam, it is 1 if a cheat earns more than an empty attempt.
    """
    import asyncio  # imported late to keep `--help` fast

    from rlkit.check import check
    from rlkit.config.loading.targets import load_target

    settings = [*(args or []), *(arguments or [])]
    envs = load_target(target, settings, seed=seed, warn=lambda warning: output.note(f"warning: {warning}"))
    if redteam:
        from rlkit.redteam.attack import attack_environment

        note = output.silent if output.json else output.note
        attack = partial(attack_environment, tasks=tasks, timeout_s=timeout_s, seed=seed, note=note)
        return print_reports(output, {name: run_terminable(attack(name, source)) for name, source in envs.items()})
    run = partial(check, tasks=tasks, timeout_s=timeout_s, seed=seed)
    return print_reports(output, {name: asyncio.run(run(source)) for name, source in envs.items()})


def check_service(
    output: Output,
    url: Annotated[
        str | None, typer.Argument(help="Address; by default the service that a run would use.", show_default=False)
    ] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Base model; by default one that the service advertises.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check only the requirements of every run.")] = False,
    timeout_s: Annotated[float, typer.Option(min=1, help="Time limit of an answer in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the test tokens.")] = 0,
) -> int:
    """Check a service of the Tinker protocol.

    The command shows which endpoints and options work, deviate from the protocol or are absent. The exit code is 1 if
    one deviates. The checks train small adapters and delete them.
    """
    from rlkit._util.model_names import DEFAULT_MODEL
    from rlkit._util.threads import in_thread
    from rlkit.config.schema import ServiceConfig
    from rlkit.conformance import check_service
    from rlkit.tinker_client.connect import reach_service
    from rlkit.tinker_client.sdk import TinkerService

    async def check() -> ServiceReport:
        async with reach_service(ServiceConfig(base_url=url), note=output.note) as address:
            if address.connector is not None:  # the SDK alone would try for minutes
                async with TinkerService(address) as service:
                    await service.open_session()
            default = DEFAULT_MODEL if address.embedded else None
            run = partial(check_service, address.base_url, api_key=address.api_key, model=model or default)
            return await in_thread(partial(run, quick=quick, timeout_s=timeout_s, seed=seed, note=output.note))

    report = run_terminable(check())
    counts = ", ".join(f"{report.count(status)} {status}" for status in ("works", "deviates", "absent", "skipped"))
    cost = f"{report.usage.requests} requests, {report.usage.tokens:,} tokens"
    if report.usd is not None:
        cost += f", ${report.usd:.2f}"
    rows = [f"{row.status:9} {row.part:12} {row.name:26} {row.detail}" for row in report.results]
    rows.append(f"{report.url}, {report.model}: {counts}; {cost}")
    output.result({"ok": report.ok, **asdict(report)}, "\n".join(rows))
    return 0 if report.ok else FAILED


def print_reports(output: Output, reports: Mapping[str, Report] | Mapping[str, RedTeamReport]) -> int:
    """Print the reports of environments by name; "" is the name of a task folder."""
    good = all(report.ok for report in reports.values())
    records: dict[str, Data] = {name: report.to_json() for name, report in reports.items()}
    body = reports[""].to_json() if "" in reports else {"envs": records}
    output.result({"ok": good, **body}, "\n\n".join(f"{name}\n{report}".lstrip() for name, report in reports.items()))
    return 0 if good else FAILED
