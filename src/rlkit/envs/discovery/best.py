"""Best constructions found by a search, with pictures and known results for comparison."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from rlkit._util import files
from rlkit._util.paths import ARTEFACTS
from rlkit.config.loading.run_config import find_run, load_run_config
from rlkit.envs.discovery import make_problem, records
from rlkit.envs.discovery.problem import Construction, Problem, describe_known_results
from rlkit.envs.discovery.records import Record
from rlkit.errors import RlkitError, UsageError, missing_extra


@dataclass(frozen=True, slots=True)
class BestRecords:
    """Best records of one search."""

    records: Sequence[tuple[Record, Path | None]]  # best first, each with its picture, a PNG file, if it is drawn
    known_results: str  # description of the best published results; empty if there are none


def best_records(
    run: str | Path,
    *,
    best: int = 3,
    draw: bool = True,
    export: Path | None = None,
    note: Callable[[str], None] = lambda message: None,
) -> tuple[Path, dict[str, BestRecords]]:
    """Read the best records of each search of a run, and draw them beside their files.

    Args:
        export: folder for a JSON file of each of these records, in EinsteinArena's form.

    Returns:
        Folder of the run, and records by environment.

    Raises:
        UsageError: the run does not exist, or has no search.
        MissingError: matplotlib is not installed.
    """
    directory = find_run(run)
    envs = load_run_config(directory).envs
    try:
        files.make_folder(export or directory)
    except OSError as error:
        raise UsageError(f"export: cannot create the folder {export}: {error.strerror}") from None
    searches = dict[str, BestRecords]()
    for name, spec in envs.items():
        folder = directory / ARTEFACTS / name
        selected = records.read_records(folder)[:best]
        args = spec.args
        if (spec.env or name) != "discovery":
            if not selected:
                continue
            args = {"problem": selected[0].problem, "options": cast("JsonValue", selected[0].options)}  # of a subclass
        problem = _load_problem(args, note)
        drawable = None if not draw else problem
        pictures = [
            drawable and draw_construction(drawable, record.construction, record.value, folder / f"{record.name}.png")
            for record in selected
        ]
        if export is not None:
            for record in selected:
                content = record.to_arena(key="values" if problem is None else problem.key)
                files.write_text(export / f"{name}-{record.name}.json", json.dumps(content))
        drawn = [*zip(selected, pictures, strict=True)]
        searches[name] = BestRecords(drawn, "" if problem is None else describe_known_results(problem))
    if not searches:
        raise UsageError(f"{directory.name} has no `discovery` environment: there are no records to show")
    return directory, searches


def draw_construction(problem: Problem, construction: Construction, value: float, path: Path) -> Path:
    """Draw a verified construction as a PNG file, and return its path.

    Raises:
        MissingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise missing_extra("matplotlib") from None
    figure = Figure(figsize=(7, 6), layout="constrained", dpi=120)
    problem.draw(figure, construction)
    figure.suptitle(f"{problem.name}: {problem.symbol} = {value:.10f}", fontsize=11)
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    files.write_bytes(path, image.getvalue())
    return path


def _load_problem(args: Mapping[str, JsonValue], note: Callable[[str], None]) -> Problem | None:
    problem, options = args.get("problem", "erdos"), args.get("options") or {}
    try:
        return make_problem(str(problem), dict(options) if isinstance(options, dict) else {})
    except RlkitError as error:  # such as a user's file that no longer exists
        note(f"records are neither drawn nor compared: {error}")
        return None
