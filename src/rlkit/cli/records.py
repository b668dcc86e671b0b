"""`rlkit records`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit._util.paths import ARTEFACTS
from rlkit.cli.common.arguments import resolve, run_directory
from rlkit.cli.common.output import Data, Output
from rlkit.errors import RlkitError, UsageError, missing_extra

if TYPE_CHECKING:
    from pydantic import JsonValue

    from rlkit.envs.discovery.problem import Problem
    from rlkit.envs.discovery.records import Record


def run(name: str, output: Output, *, best: int, draw: bool) -> int:
    """List the best constructions of a run, and draw them beside their records. Returns the exit code.

    Raises:
        UsageError: there is no such run, or it has no search.
        MissingError: matplotlib is not installed.
    """
    from rlkit.envs.discovery import records
    from rlkit.envs.discovery.problem import known

    directory = run_directory(name)
    config = resolve([str(directory / "config.yaml")]).config
    searches = [env for env, spec in config.envs.items() if (spec.env or env) == "discovery"]
    if not searches:
        raise UsageError(f"{directory.name} has no environment `discovery`, and so no records")
    told, without_a_model = dict[str, Data](), dict[str, Data]()
    for env in searches:
        folder = directory / ARTEFACTS / env
        found = records.read(folder)[:best]
        problem = _problem(config.envs[env].args, output)
        pictures = [None if problem is None or not draw else _picture(problem, one, folder) for one in found]
        told[env] = [_data(one, picture) for one, picture in zip(found, pictures, strict=True)]
        compared = "" if problem is None else known(problem)
        without_a_model[env] = compared
        if output.json:
            continue
        if not found:
            output.line(f"{env}: no records: nothing is better than what it began with")
        for place, (one, picture) in enumerate(zip(found, pictures, strict=True), 1):
            output.line(line(env, place, one, picture))
        if compared:
            output.line(f"{env}, for comparison: {compared}")
    if output.json:
        output.data({"run": directory.name, "records": told, "known": without_a_model})
    return 0


def line(env: str, place: int, record: Record, picture: Path | None) -> str:
    """A record in a few lines: its value, where it is from, what is proven of it, and its picture."""
    size = "x".join(map(str, record.construction.shape))
    polished = ", polished by a local search" if record.polished else ""
    told = [f"{env} {place}: {record.symbol} = {record.value:.12g}, {size} values, of {record.task}{polished}"]
    if record.certificate is not None:
        told.append(f"    {record.certificate.claim}")
    if picture is not None:
        told.append(f"    drawn in {picture}")
    return "\n".join(told)


def _problem(args: Mapping[str, JsonValue], output: Output) -> Problem | None:
    """The problem of a search, which knows how its constructions are drawn."""
    from rlkit.envs.discovery import problem_of

    given, options = args.get("problem", "erdos"), args.get("options") or {}
    try:
        return problem_of(str(given), dict(options) if isinstance(options, dict) else {})
    except RlkitError as error:  # a file of the user's own that is not there any more
        output.note(f"nothing is drawn or compared: {error}")
        return None


def _picture(problem: Problem, record: Record, folder: Path) -> Path:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise missing_extra("matplotlib") from None
    from rlkit._util import files

    figure = Figure(figsize=(7, 6), layout="constrained", dpi=120)
    problem.draw(figure, record.construction)
    figure.suptitle(f"{record.problem}: {record.symbol} = {record.value:.10f}", fontsize=11)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    path = folder / f"{record.name}.png"
    files.write_bytes(path, drawn.getvalue())
    return path


def _data(record: Record, picture: Path | None) -> Data:
    proven = record.certificate
    return {
        "value": record.value,
        "symbol": record.symbol,
        "problem": record.problem,
        "task": record.task,
        "parent": record.parent,
        "polished": record.polished,
        "shape": list(record.construction.shape),
        "certificate": None
        if proven is None
        else {"claim": proven.claim, "bound": proven.bound, "exact": proven.exact},
        "file": record.name,
        "picture": None if picture is None else str(picture),
    }
