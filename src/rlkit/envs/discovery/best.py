"""The best records of a run, with their pictures and what they are compared with."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit._util import files
from rlkit._util.paths import ARTEFACTS
from rlkit.envs.discovery import problem_of, records
from rlkit.envs.discovery.problem import Problem, known
from rlkit.envs.discovery.records import Record
from rlkit.errors import RlkitError, UsageError, missing_extra
from rlkit.store.metadata import find_run, load_run_config

if TYPE_CHECKING:
    from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class BestRecords:
    """The best records of one search.

    Args:
        records: the best first.
        pictures: the PNG file of each; None for those that are not drawn.
        known: what is known of the problem without a model; "" for nothing.
    """

    records: Sequence[Record]
    pictures: Sequence[Path | None]
    known: str


def best_records(
    run: str | Path, *, best: int = 3, draw: bool = True, note: Callable[[str], None] = lambda message: None
) -> tuple[Path, dict[str, BestRecords]]:
    """Read the `best` constructions of each search of a run, and draw them beside their records.

    Returns:
        The run's folder, and the records by environment.

    Raises:
        UsageError: there is no such run, or it has no search.
        MissingError: matplotlib is not installed.
    """
    directory = find_run(run)
    envs = {name: spec for name, spec in load_run_config(directory).envs.items() if (spec.env or name) == "discovery"}
    if not envs:
        raise UsageError(f"{directory.name} has no environment `discovery`, and so no records")
    searches = dict[str, BestRecords]()
    for name, spec in envs.items():
        folder = directory / ARTEFACTS / name
        problem = _problem(spec.args, note)
        best_ones = records.read(folder)[:best]
        drawn = None if not draw else problem
        pictures = [drawn and draw_record(drawn, record, folder) for record in best_ones]
        searches[name] = BestRecords(best_ones, pictures, "" if problem is None else known(problem))
    return directory, searches


def draw_record(problem: Problem, record: Record, folder: Path) -> Path:
    """Draw a construction as a PNG file of the record's name.

    Raises:
        MissingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise missing_extra("matplotlib") from None
    figure = Figure(figsize=(7, 6), layout="constrained", dpi=120)
    problem.draw(figure, record.construction)
    figure.suptitle(f"{record.problem}: {record.symbol} = {record.value:.10f}", fontsize=11)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    path = folder / f"{record.name}.png"
    files.write_bytes(path, image.getvalue())
    return path


def _problem(args: Mapping[str, JsonValue], note: Callable[[str], None]) -> Problem | None:
    problem, options = args.get("problem", "erdos"), args.get("options") or {}
    try:
        return problem_of(str(problem), dict(options) if isinstance(options, dict) else {})
    except RlkitError as error:  # a file of the user's own that is not there any more
        note(f"nothing is drawn or compared: {error}")
        return None
