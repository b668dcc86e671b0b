"""`rlkit check`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.cli.output import Data, Output

if TYPE_CHECKING:
    from rlkit.check import Report
    from rlkit.env import Env, TaskSource

CONFIG_SUFFIXES = (".yaml", ".yml", ".json")
FAULTS_FOUND = 1


def run(target: str, arguments: Sequence[str], output: Output, *, tasks: int, timeout_s: float, seed: int) -> int:
    """Check what `target` names, and print a line a check. Returns the exit code."""
    from rlkit.check import check

    reports = {
        name: asyncio.run(check(env, tasks=tasks, timeout_s=timeout_s, seed=seed))
        for name, env in environments(target, arguments, seed=seed).items()
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
    from rlkit.config import load_config, load_envs

    path = Path(target)
    if path.suffix in CONFIG_SUFFIXES:
        config = load_config([path], arguments).config
        return {
            name: load_envs(name, spec, field=f"envs.{name}", seed=config.seed) for name, spec in config.envs.items()
        }
    # As a configuration of its own, so that values mean and errors say what they do everywhere else.
    given = [f"envs.target.env={json.dumps(target)}", *(f"envs.target.args.{argument}" for argument in arguments)]
    spec = load_config([], given).config.envs["target"]
    return {target: load_envs(target, spec, field="target", seed=seed)}


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
