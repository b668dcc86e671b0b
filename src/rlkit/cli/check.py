"""`rlkit check`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit.cli.common.output import Data, Output

if TYPE_CHECKING:
    from rlkit.check import Report
    from rlkit.config import Resolved
    from rlkit.env import Env, TaskSource
    from rlkit.types import Json

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
FAULTS_FOUND = 1


def run(
    target: str, arguments: Sequence[str], output: Output, *, tasks: int, timeout_s: float, seed: int, redteam: bool
) -> int:
    """Check what `target` names, or try the red team's cheats on it, and print the result. Returns the exit code."""
    from rlkit.check import check

    for warning in secret_warnings(target, arguments):
        output.note(f"warning: {warning}")
    targets = environments(target, arguments, seed=seed)
    if redteam:
        from rlkit.cli.tasks.redteam import attack_environments

        return attack_environments(targets, output, tasks=tasks, timeout_s=timeout_s, seed=seed)
    reports = {
        name: asyncio.run(check(env, tasks=tasks, timeout_s=timeout_s, seed=seed)) for name, env in targets.items()
    }
    good = all(report.ok for report in reports.values())
    if output.json:
        found: dict[str, Data] = {name: _record(report) for name, report in reports.items()}
        output.data({"ok": good, "envs": found})
    else:
        output.line("\n\n".join(f"{name}\n{table(report)}" for name, report in reports.items()))
    return 0 if good else FAULTS_FOUND


def environments(target: str, arguments: Sequence[str], *, seed: int) -> dict[str, TaskSource | Sequence[Env]]:
    """What `target` names: all environments of a configuration file, or one that is built in or in a file.

    Raises:
        UsageError: it names nothing, or cannot be made with these arguments.
    """
    from rlkit.config import load_envs

    config = _configuration(target, arguments).config
    if _is_configuration(target):
        return {
            name: load_envs(name, spec, field=f"envs.{name}", seed=config.seed) for name, spec in config.envs.items()
        }
    return {target: load_envs(target, config.envs["target"], field="target", seed=seed)}


def secret_warnings(target: str, arguments: Sequence[str]) -> list[str]:
    """Return a line for each secret that is written out in the arguments of an environment.

    Raises:
        UsageError: it names nothing, or the configuration is wrong.
    """
    from rlkit.config.loading import secrets

    envs = cast("dict[str, dict[str, dict[str, Json]]]", _configuration(target, arguments).tree["envs"])
    warnings = list[str]()
    for name, spec in envs.items():
        field = f"envs.{name}.args" if _is_configuration(target) else "--args"
        warnings += secrets.secret_warnings(spec["args"], field=field)
    return warnings


def _is_configuration(target: str) -> bool:
    return Path(target).suffix in CONFIG_SUFFIXES


def _configuration(target: str, arguments: Sequence[str]) -> Resolved:
    from rlkit.config import load_config

    if _is_configuration(target):
        return load_config([Path(target)], arguments)
    # As a configuration of its own, so that values mean and errors say what they do everywhere else.
    given = [f"envs.target.env={json.dumps(target)}", *(f"envs.target.args.{argument}" for argument in arguments)]
    return load_config([], given)


def table(report: Report) -> str:
    """`passed  determinism  …`, with the fix below what failed."""
    width = max((len(finding.check) for finding in report.findings), default=0)
    lines: list[str] = []
    for finding in report.findings:
        lines.append(f"  {finding.status:8}{finding.check:{width}}  {finding.detail}".rstrip())
        if finding.status == "failed" and finding.fix:
            lines.append(f"  {'':8}{'':{width}}  fix: {finding.fix}")
    return "\n".join(lines)


def _record(report: Report) -> Data:
    return {"ok": report.ok, "findings": [asdict(finding) for finding in report.findings]}
