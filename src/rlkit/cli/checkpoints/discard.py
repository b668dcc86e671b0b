"""`rlkit checkpoints delete`, `prune` and `ttl`.

Invariant: nothing is deleted that was not shown first, and nothing without a yes: from a person, or as an option.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.cli.checkpoints.choosing import Filter, Named, config_of, named
from rlkit.cli.checkpoints.show import line, row, stored
from rlkit.cli.common.arguments import run_directory
from rlkit.cli.common.output import Data, Output
from rlkit.cli.common.signals import run_terminable
from rlkit.errors import RlkitError, UsageError

if TYPE_CHECKING:
    from rlkit.config.schema import ServiceConfig
    from rlkit.service import Stored
    from rlkit.types import Checkpoint

NOT_ALL = 1
_DAY_S = 86400
_MIB = 2**20


def delete(what: Sequence[str], output: Output, *, only: Filter, every: bool, yes: bool, dry_run: bool) -> int:
    """Delete what is named and passes the filters. Returns the exit code."""
    chosen = named(what, every=every)
    found = _of(chosen, only.of(run_terminable(stored(chosen.service, output.note))))
    missing = sorted(set(what) & (chosen.paths or frozenset()) - {one.path for one in found}) if only.takes_all else []
    if missing:
        raise UsageError(f"the service has no checkpoint {missing[0]}")
    return _discard(chosen, found, output, yes=yes, dry_run=dry_run)


def prune(run: str, output: Output, *, keep_last: int, keep_best: int, yes: bool, dry_run: bool) -> int:
    """Delete the checkpoints of a run that are neither new nor good. Returns the exit code."""
    from rlkit.store import checkpoints, lines
    from rlkit.training.from_config import selection

    directory = run_directory(run)
    config = config_of(directory)
    kept = {one.path: one for one in run_terminable(stored(config.service, output.note))}
    there = [one for one in checkpoints(directory) if one.state in kept]
    ranking = selection(config, lines.numbers(directory / "metrics.jsonl"))
    ranking.keep_last, ranking.keep_best = keep_last, keep_best
    spare = ranking.superfluous(there, reported=max((one.step for one in there), default=0))
    found = [kept[path] for one in spare for path in (one.state, one.sampler) if path in kept]
    return _discard(Named(config.service, None, (directory,)), found, output, yes=yes, dry_run=dry_run)


def set_ttl(
    what: Sequence[str], output: Output, *, only: Filter, every: bool, days: float | None, dry_run: bool
) -> int:
    """Say when what is named expires; None for never. Returns the exit code."""
    chosen = named(what, every=every)
    found = _of(chosen, only.of(run_terminable(stored(chosen.service, output.note))))
    ttl_s = None if days is None else round(days * _DAY_S)
    until = "never" if days is None else f"in {days:g} days"
    expires = None if ttl_s is None else only.now + ttl_s
    shown = [replace(one, expires=expires) for one in found]
    if dry_run or not found:
        return _told(shown, output, f"would expire {until}", done=0)

    async def changed() -> list[str]:
        from rlkit.service.connect import connect

        async with connect(chosen.service, note=output.note, session=False) as connection:
            for one in found:
                await connection.set_ttl(one.path, ttl_s)
            return [one.path for one in found]

    paths = run_terminable(changed())
    _rewrite(paths, chosen.runs, lambda saved: replace(saved, expires=expires))
    return _told(shown, output, f"expire {until}", done=len(paths))


def _of(chosen: Named, found: Iterable[Stored]) -> list[Stored]:
    return [one for one in found if chosen.paths is None or one.path in chosen.paths]


def _discard(chosen: Named, found: Sequence[Stored], output: Output, *, yes: bool, dry_run: bool) -> int:
    if dry_run or not found:
        return _told(found, output, "would be deleted", done=0)
    if not yes:
        output.note("\n".join(line(row(one)) for one in found))
        if not _agreed(f"delete {_amount(found)}, for good?", output):
            output.note("nothing was deleted")
            return 0
    gone, failed = run_terminable(_deleted(chosen.service, found, output.note))
    _rewrite(gone, chosen.runs, lambda saved: None)
    for problem in failed:
        output.error(problem)
    code = _told([one for one in found if one.path in set(gone)], output, "deleted", done=len(gone))
    return NOT_ALL if failed else code


async def _deleted(
    service: ServiceConfig, found: Sequence[Stored], note: Callable[[str], None]
) -> tuple[list[str], list[str]]:
    """The paths that are gone, and why others are not."""
    from rlkit.service.connect import connect

    gone, failed = list[str](), list[str]()
    async with connect(service, note=note, session=False) as connection:
        for one in found:
            try:
                with suppress(UsageError):  # it has gone meanwhile
                    await connection.delete(one.path)
                gone.append(one.path)
            except RlkitError as error:
                failed.append(str(error))
    return gone, failed


def _agreed(question: str, output: Output) -> bool:
    if output.json or not sys.stdin.isatty():
        raise UsageError(f"{question} There is nobody to ask: give --yes, or --dry-run to look first")
    output.err.write(f"{question} [y/N] ")
    output.err.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _amount(found: Sequence[Stored]) -> str:
    size = sum(one.size_bytes or 0 for one in found) / _MIB
    return f"{len(found)} checkpoint{'' if len(found) == 1 else 's'} of {size:,.1f} MiB"


def _told(found: Sequence[Stored], output: Output, verb: str, *, done: int) -> int:
    if output.json:
        rows: list[Data] = [row(one) for one in found]
        result: Mapping[str, Data] = {"done": done, "checkpoints": rows}
        output.data(result)
    elif not found:
        output.line("there is no such checkpoint")
    else:
        output.line("\n".join([*(line(row(one)) for one in found), f"{_amount(found)} {verb}"]))
    return 0


def _rewrite(paths: Iterable[str], runs: Iterable[Path], changed: Callable[[Checkpoint], Checkpoint | None]) -> None:
    """Say in the folders of runs what became of their checkpoints, so that they do not go on from what is gone."""
    from rlkit._util.paths import runs_dir
    from rlkit.store import checkpoints, lines

    touched = set(paths)
    for file in {*runs_dir().glob("*/checkpoints.jsonl"), *(run / "checkpoints.jsonl" for run in runs)}:
        with suppress(UsageError, OSError):  # of another run, whose folder is damaged
            for saved in checkpoints(file.parent):
                if saved.state in touched:
                    now = changed(saved)
                    lines.append(file, {"step": saved.step, "deleted": saved.state} if now is None else asdict(now))
