"""The summary of a run, for lists of runs: its status, its steps, and its first and latest results.

Invariant: a large file is read at its ends only, and a damaged configuration hides nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlkit._util.files import json_lines
from rlkit._util.files.json_fields import pick, pick_list, pick_numbers
from rlkit._util.files.run_locks import is_locked
from rlkit.config.loading.resolved import find_tags
from rlkit.errors import RlkitError, UsageError
from rlkit.metrics.rewards import mean_reward

STEP_PATTERN = '"env/'
"""Text in the metrics of a step, and not in those of an evaluation alone."""

_TOKENS = ("prefill_tokens", "cached_tokens", "sampled_tokens", "trained_tokens")


def summarize_run(directory: Path) -> dict[str, Any]:
    """Return the summary of a run as JSON.

    Values that were not recorded are None. `damaged` says what is damaged in the configuration. `reward` and
    `evaluation` have the first and the latest value; see `find_ends`.

    Raises:
        UsageError: another file of the run is damaged.
    """
    about, usage = json_lines.read_object(directory / "run.json"), dict[str, Any]()
    with suppress(OSError, UsageError):  # it counts again from zero, and so does a resumed run
        usage = json_lines.read_object(directory / "usage.json")
    status = pick(about, "status", str)
    is_live = status == "running" and is_locked(directory / "lock")
    config, unread = read_configuration(directory, lambda path: path.read_text(errors="replace"), default="")
    tags, damage = read_configuration(directory, lambda _: find_tags(config), default=[])
    end = pick(about, "config_end", str) or ""  # not in runs of earlier releases
    cut = None if config.rstrip().endswith(end) else f"{directory / 'config.yaml'} is damaged: its end is missing"
    steps = sum(map(int, re.findall(r"^(?:  )?steps: (\d{1,9})\b", config, re.MULTILINE)))  # with those of a warm start
    is_late = re.search("^warm_start:(?! null)", config, re.MULTILINE) is not None  # conversations have no reward
    is_rare = (directory / "evaluations").is_dir()
    # True where such lines may be in the middle of the file.
    patterns = {STEP_PATTERN: False, '"env/[^/"]+/reward/mean"': is_late, '"eval/': is_rare}
    (_, last), played, evaluated = json_lines.read_ends(directory / "metrics.jsonl", patterns)
    step, evaluation = pick(last, "step", int) or 0, _average_ends(*evaluated, prefix="eval")
    paths = [path for name in ("metrics.jsonl", "run.json", "usage.json") if (path := directory / name).exists()]
    return {
        "name": directory.name,
        "path": str(directory),
        "status": "killed" if status == "running" and not is_live else status,
        "live": is_live,
        "reason": pick(about, "error", str) or pick(about, "reason", str),
        "damaged": unread or damage or cut,
        "started": pick(about, "started", float),
        "updated": max(path.stat().st_mtime for path in paths),
        "step": step,
        "steps": max(steps, step) if steps else None,  # it may be resumed with fewer steps
        "model": pick(about, "identity.model", str),
        "envs": [str(env) for env in pick_list(about, "identity.envs")],
        "tags": tags,
        "reward": _average_ends(*played, prefix="env"),
        "evaluation": evaluation and {"metric": "reward", "start": evaluation[0], "now": evaluation[1]},
        "tokens": sum(pick(usage, name, int) or 0 for name in _TOKENS),
        "usd": pick(last, "usage/usd", float),
    }


def read_configuration[T](directory: Path, read: Callable[[Path], T], *, default: T) -> tuple[T, str | None]:
    """Return what `read` returns of a run's configuration, and what is damaged, with the default, if it fails."""
    path = directory / "config.yaml"
    try:
        return read(path) if path.exists() else default, None
    except (RlkitError, OSError) as error:
        return default, str(error)


def find_ends(values: Sequence[float | None]) -> list[float | None] | None:
    """Return the first and the last of the known values, None as the first of a single one; None if there is none."""
    if not (known_values := [value for value in values if value is not None]):
        return None
    return [known_values[0] if len(known_values) > 1 else None, known_values[-1]]


def _average_ends(first: dict[str, Any], last: dict[str, Any], *, prefix: str) -> list[float | None] | None:
    """Return the mean rewards of the first and the last line, which may be the same; see `find_ends`."""
    lines = [last] if first == last else [first, last]
    return find_ends([mean_reward(pick_numbers(line, ""), prefix) for line in lines])
