"""Searches of a run: its records with their pictures, and the tree of its states."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlkit._util.files import json_lines
from rlkit._util.paths import ARTEFACTS
from rlkit.envs.discovery import PROBLEMS, make_problem
from rlkit.envs.discovery.problem import Construction, describe_known_results, hash_construction
from rlkit.errors import RlkitError
from rlkit.store.history import list_state_steps, state_path
from rlkit.view.tables import Row

_SUFFIX = ".record.json"
_VALUES_MAX = 4096


def list_searches(directory: Path, envs: Sequence[str]) -> list[Row]:
    """Return the records of each search, best first, and the states that its archive holds."""
    steps = list_state_steps(directory)
    state = json_lines.read_object(state_path(directory, steps[-1])) if steps else {}
    archives = list(_find_archives(state))
    searches = list[Row]()
    for env in envs:
        paths = sorted((directory / ARTEFACTS / env).glob(f"*{_SUFFIX}"), reverse=True)
        records = [_read_record(path) for path in paths]
        problem = records[0]["problem"]
        nodes: list[Row] = next(
            (archive["nodes"] for archive in archives if archive["problem"] == problem), list[Row]()
        )
        values = [record["value"] for record in records]
        searches.append({
            "env": env,
            "problem": problem,
            "symbol": records[0]["symbol"],
            "sign": 1 if values[0] >= values[-1] else -1,
            "known": _describe_known(records[0]),
            "records": records,
            "states": [_show_state(node) for node in nodes],
        })  # fmt: skip
    return searches


def _describe_known(record: Row) -> str:
    """Return the best published results of a record's problem; empty for a problem of the user's own.

    Code is loaded for no name but those of built-in problems, because the record may come from somebody else.
    """
    options: Mapping[str, Any] = record["options"] or {}
    if record["problem"] not in PROBLEMS or not all(
        isinstance(value, int | float | None) for value in options.values()
    ):
        return ""
    try:
        return describe_known_results(make_problem(record["problem"], dict(options)))
    except RlkitError:  # options of another release
        return ""


def _find_archives(value: object) -> Iterator[Mapping[str, Any]]:
    """Yield each archive in the state of the task sources."""
    if isinstance(value, dict):
        fields = cast("Mapping[str, Any]", value)
        if "nodes" in fields and "problem" in fields:
            yield fields
        else:
            yield from _find_archives(list(fields.values()))
    elif isinstance(value, list):
        for child in cast("list[object]", value):
            yield from _find_archives(child)


def _read_record(path: Path) -> Row:
    content = json_lines.read_object(path)
    picture = path.with_name(path.name.removesuffix(_SUFFIX) + ".png")
    certificate: Mapping[str, Any] = content.get("certificate") or {}
    data = base64.b64encode(picture.read_bytes()).decode() if picture.exists() else None
    names = ("problem", "options", "symbol", "value", "task", "parent", "program", "polished")
    return {
        **{name: content.get(name) for name in names},
        "step": None,
        "claim": certificate.get("claim"),
        "values": content.get("values", [])[:_VALUES_MAX],
        "picture": None if data is None else f"data:image/png;base64,{data}",
    }


def _show_state(node: Mapping[str, Any]) -> Row:
    """Return a state for the tree; its id is the hash of its numbers, as the children name it."""
    data = base64.b64decode(node["construction"])
    numbers: Construction = np.frombuffer(data, np.float64).reshape(cast("list[int]", node["shape"]))
    names = ("parent", "value", "seed", "expansions")
    return {"id": hash_construction(numbers), **{name: node.get(name) for name in names}}
