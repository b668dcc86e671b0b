"""Searches of a run: its records with their pictures, and the tree of its states.

Invariant: a record has the step whose table has the group of its task, or None before the step is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit._util.files import json_lines
from rlkit._util.files.json_fields import pick
from rlkit._util.paths import ARTEFACTS
from rlkit.envs.discovery import PROBLEMS, make_problem
from rlkit.envs.discovery.problem import describe_known_results, hash_construction
from rlkit.envs.discovery.state import decode_construction
from rlkit.errors import RlkitError
from rlkit.store.history import list_state_steps, list_table_steps, state_path, table_path
from rlkit.view.records.reader import Row, make_data_uri
from rlkit.view.tables import cache_file, read_scores

_SUFFIX = ".record.json"
_VALUES_MAX = 4096

_list_tasks = cache_file(lambda path: {(env, task) for env, task, *_ in read_scores(path)}, files=10_000)


def list_searches(directory: Path, envs: Sequence[str]) -> list[Row]:
    """Return the records of each search, best first, and the tree of its states."""
    steps = list_state_steps(directory)
    state = json_lines.read_object(state_path(directory, steps[-1])) if steps else {}
    sources: Mapping[str, Row] = state.get("sources", {})
    step_by_task = _find_steps(directory)
    return [_read_search(directory / ARTEFACTS / env, sources.get(env, {}), step_by_task) for env in envs]


def _read_search(folder: Path, source: Row, step_by_task: Mapping[tuple[str, str], int]) -> Row:
    paths = sorted(folder.glob(f"*{_SUFFIX}"), reverse=True)
    records = [_read_record(path, step_by_task) for path in paths]
    nodes = [_show_state(node) for node in source.get("archive", {}).get("nodes", [])]
    dropped = [state for record in records[::-1] for state in _list_lineage(record)]
    states = [*{state["id"]: state for state in (*dropped, *nodes)}.values()]  # each after its parent
    best: Row = records[0]
    values: list[Any] = [row["value"] for row in (*records, *states)]
    return {
        "env": folder.name,
        "problem": best["problem"],
        "symbol": best["symbol"],
        "sign": 1 if best["value"] >= max(values) else -1,
        "known": _describe_known(best),
        "records": records,
        "states": states,
    }


def _list_lineage(record: Row) -> list[Row]:
    """Return a record after its ancestors, as states that the archive has dropped."""
    line = [*record["lineage"][::-1], (record["id"], record["value"])]
    parents = [None, *(name for name, _ in line)]
    return [
        {"id": name, "parent": parent, "value": value, "seed": parent is None, "expansions": None}
        for (name, value), parent in zip(line, parents, strict=False)
    ]


def _find_steps(directory: Path) -> Mapping[tuple[str, str], int]:
    """Return the step of each environment and task: the one that has its group, since a search never repeats a task."""
    steps = list_table_steps(directory)
    return {key: step for step in steps for key in _list_tasks(table_path(directory, step))}


def _describe_known(record: Row) -> str:
    """Return the best published results of a record's problem; empty for a problem of the user's own.

    Code is loaded for no name but those of built-in problems, because the record may come from somebody else.
    """
    options: Mapping[str, Any] = record["options"] or {}
    is_plain = all(isinstance(value, int | float | str | None) for value in options.values())
    if record["problem"] not in PROBLEMS or not is_plain:
        return ""
    try:
        return describe_known_results(make_problem(record["problem"], dict(options)))
    except RlkitError:  # options of another release
        return ""


def _read_record(path: Path, step_by_task: Mapping[tuple[str, str], int]) -> Row:
    content = json_lines.read_object(path)
    picture = path.with_name(path.name.removesuffix(_SUFFIX) + ".png")
    names = ("problem", "options", "symbol", "value", "task", "parent", "program", "polished")
    return {
        **{name: content.get(name) for name in names},
        "id": path.name.removesuffix(_SUFFIX).partition("-")[2],
        "lineage": content.get("lineage", []),
        "step": step_by_task.get((path.parent.name, content.get("task", ""))),
        "claim": pick(content, "certificate.claim", str),
        "values": content.get("values", [])[:_VALUES_MAX],
        "picture": make_data_uri("png", picture.read_bytes()) if picture.exists() else None,
    }


def _show_state(node: Mapping[str, Any]) -> Row:
    """Return a state for the tree; its id is the hash of its numbers, as the children name it."""
    names = ("parent", "value", "seed", "expansions")
    return {"id": hash_construction(decode_construction(node)), **{name: node.get(name) for name in names}}
