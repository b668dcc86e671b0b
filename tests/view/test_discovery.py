"""Records of a search have the steps in which they were found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlkit._util import files
from rlkit.envs.discovery.problem import hash_construction
from rlkit.envs.discovery.state import State
from rlkit.store import table
from rlkit.store.history import state_path, table_path
from rlkit.types import Group
from rlkit.view.discovery import list_searches
from tests.builders import episode


def write_step(directory: Path, step: int, tasks: Sequence[tuple[str, str]]) -> None:
    """Write the table of a step that has a group of one episode for each environment and task."""
    groups = [Group(env, task, number, (episode(1.0),)) for number, (env, task) in enumerate(tasks)]
    path = table_path(directory, step)
    files.make_folder(path.parent)
    table.write(path, [table.RecordedGroup(group, False, group.episodes) for group in groups])


def write_record(directory: Path, env: str, number: int, task: str, value: float) -> None:
    """Write a record as a search does."""
    record = {"problem": "own.py:Problem", "symbol": "S", "value": value, "task": task, "values": [value]}
    files.write_text(directory / "artefacts" / env / f"{number:04d}-x.record.json", json.dumps(record))


def test_a_record_has_the_step_that_holds_the_group_of_its_task(tmp_path: Path) -> None:
    write_step(tmp_path, 1, [("a", "p/00001-x"), ("b", "p/00001-x")])
    write_step(tmp_path, 2, [("a", "p/00000-x")])  # drawn first, but in a later step
    for number, (task, value) in enumerate([("p/00000-x", 3.0), ("p/00001-x", 2.0), ("p/00002-x", 1.0)], 1):
        write_record(tmp_path, "a", number, task, value)
    write_record(tmp_path, "b", 1, "p/00001-x", 5.0)
    first, second = list_searches(tmp_path, ["a", "b"])
    assert [(record["value"], record["step"]) for record in first["records"]] == [(1.0, None), (2.0, 1), (3.0, 2)]
    assert [record["step"] for record in second["records"]] == [1]
    write_step(tmp_path, 3, [("a", "p/00002-x")])  # the step is complete
    assert list_searches(tmp_path, ["a"])[0]["records"][0]["step"] == 3


def test_a_search_with_one_record_knows_which_values_are_good(tmp_path: Path) -> None:
    write_record(tmp_path, "a", 1, "p/00000-x", 1.0)
    write_record(tmp_path, "b", 1, "p/00000-x", 1.0)
    node = {"construction": "AAAAAAAA8D8=", "shape": [1], "parent": None, "seed": True, "expansions": 0}
    sources = {env: {"archive": {"nodes": [{**node, "value": value}]}} for env, value in (("a", 2.0), ("b", 0.5))}
    files.write_text(state_path(tmp_path, 1), json.dumps({"sources": sources}))
    searches = list_searches(tmp_path, ["a", "b"])
    assert [(search["sign"], len(search["states"])) for search in searches] == [(-1, 2), (1, 2)]


def test_the_tree_has_ancestors_of_records_that_the_archive_dropped(tmp_path: Path) -> None:
    record = {"problem": "own.py:Problem", "symbol": "S", "value": 1.0, "task": "p/1", "values": [1.0], "parent": "b"}
    text = json.dumps({**record, "lineage": [["b", 2.0], ["a", 3.0]]})
    files.write_text(tmp_path / "artefacts" / "a" / "0001-c.record.json", text)
    node = {"construction": "AAAAAAAA8D8=", "shape": [1], "parent": None, "seed": True, "expansions": 2, "value": 3.0}
    files.write_text(state_path(tmp_path, 1), json.dumps({"sources": {"a": {"archive": {"nodes": [node]}}}}))
    (search,) = list_searches(tmp_path, ["a"])
    *dropped, kept = search["states"]
    assert (kept["seed"], kept["expansions"]) == (True, 2)
    assert [(state["id"], state["parent"], state["value"], state["expansions"]) for state in dropped] == [
        ("a", None, 3.0, None),
        ("b", "a", 2.0, None),
        ("c", "b", 1.0, None),
    ]


def test_a_kept_state_is_once_in_the_tree_after_its_dropped_ancestors(tmp_path: Path) -> None:
    construction = np.array([1.0])
    record = {"problem": "own.py:Problem", "symbol": "S", "value": 1.0, "task": "p/1", "values": [1.0], "parent": "b"}
    path = tmp_path / "artefacts" / "a" / f"0001-{hash_construction(construction)}.record.json"
    files.write_text(path, json.dumps({**record, "lineage": [["b", 2.0]]}))
    node = State(construction, 1.0, parent="b").to_json() | {"seed": False, "expansions": 4}
    files.write_text(state_path(tmp_path, 1), json.dumps({"sources": {"a": {"archive": {"nodes": [node]}}}}))
    (search,) = list_searches(tmp_path, ["a"])
    assert [(state["parent"], state["expansions"]) for state in search["states"]] == [(None, None), ("b", 4)]
