from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rlkit.envs.discovery.problem import Problem, load_published
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.problems.packing import CirclePacking
from rlkit.envs.discovery.records import read_records, save_if_better
from rlkit.envs.discovery.state import State
from tests.simulation import Simulation, Talk


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which it is made believe that it had two searches."""
    simulation = Simulation(tmp_path / "runs" / "first", tasks=[Talk(number) for number in range(4)])
    simulation.train()
    directory = simulation.directory
    config = yaml.safe_load((directory / "config.yaml").read_text())
    env_settings = next(iter(config["envs"].values()))
    config["envs"] = {
        "erdos": {**env_settings, "env": "discovery"},
        "packing": {**env_settings, "env": "discovery", "args": {"problem": "circle_packing"}},
        "empty": {**env_settings, "env": "discovery"},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    for name in ("erdos_haugland_2016", "erdos_alphaevolve_2025", "erdos_haugland_2016", "erdos_ttt_discover_2026"):
        save_record(directory / "artefacts" / "erdos", Erdos(), name)
    save_record(directory / "artefacts" / "packing", CirclePacking(26), "circle_packing_26_alphaevolve_2025")
    return directory


def save_record(folder: Path, problem: Problem, name: str) -> None:
    verified = problem.verify(load_published(name))
    save_if_better(
        folder,
        State(verified.construction, verified.value, "parent", 0.5, "x"),
        problem,
        task=f"task/{name}",
    )


def test_best_constructions_are_listed_with_bounds_and_pictures(rlkit: Callable[..., Any], run: Path) -> None:
    result = rlkit("records", "first", "--best", "2")
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("empty")]
    assert lines[0].startswith("erdos 1: C5 = 0.380875323218, 600 values, of task/erdos_ttt_discover_2026")
    assert lines[1].strip().startswith("C5 <= 0.3808753233, proven exactly")
    assert lines[3].startswith("erdos 2: C5 = 0.380923035108, 95 values")
    assert "packing 1: the sum of the radii = 2.63586275641, 26x3 values" in result.stdout
    assert "empty: no records: no construction improves on the initial ones" in result.stdout
    compared = next(line for line in result.stdout.splitlines() if line.startswith("erdos, for comparison"))
    assert "the best published 0.3808563308462765 (rlkit, from MILO's construction, 2026-11-29); " in compared
    assert "; a scripted search without a model reaches" in compared
    pictures = sorted(run.glob("artefacts/*/*.png"))
    assert len(pictures) == 3
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in pictures)


def test_records_are_available_as_json(rlkit: Callable[..., Any], run: Path) -> None:
    output = json.loads(rlkit("records", "first", "--json", "--no-draw").stdout)
    records = output["records"]
    assert "a scripted search without a model reaches" in output["known_results"]["erdos"]
    assert [record["value"] for record in records["erdos"]] == sorted(record["value"] for record in records["erdos"])
    assert len(records["erdos"]) == 3  # what was no better than a record is none
    assert records["erdos"][0]["certificate"]["bound"] == "0.3808753233"
    assert not list(run.glob("artefacts/*/*.png"))
    record = read_records(run / "artefacts" / "packing")[0]
    assert record.construction.shape == (26, 3)
    assert record.construction[:, 2].sum() == pytest.approx(record.value)


def test_exported_records_verify_to_the_same_certificate(rlkit: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    result = rlkit("records", "first", "--no-draw", "--best", "2", "--export", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    packing, first, second = sorted((tmp_path / "out").glob("*.json"), key=lambda path: -len(path.name))
    assert [packing.name[:12], first.name[:10], second.name[:10]] == ["packing-0001", "erdos-0002", "erdos-0003"]
    for path, problem in ((packing, "circle_packing"), (first, "erdos"), (second, "erdos")):
        content = json.loads(path.read_text())
        assert content["problem"] == problem
        key = "circles" if problem == "circle_packing" else "values"
        assert np.shape(content[key])
        assert set(content) == {key, "problem", "options", "certificate", "score"}
        output = json.loads(rlkit("verify", problem, path, "--no-draw", "--json").stdout)
        assert output["certificate"] == content["certificate"]
        assert output["value"] == content["score"]


def test_records_are_not_exported_over_a_file(rlkit: Callable[..., Any], run: Path, tmp_path: Path) -> None:
    result = rlkit("records", "first", "--no-draw", "--export", run / "config.yaml")
    assert (result.exit_code, "is a file" in result.stderr) == (2, True), result.stderr


def test_a_folder_for_records_that_cannot_be_created_is_one_line(rlkit: Callable[..., Any], run: Path) -> None:
    result = rlkit("records", "first", "--no-draw", "--export", "/proc/nope")
    expected = "error: export: cannot create the folder /proc/nope: No such file or directory\n"
    assert (result.exit_code, result.stderr) == (2, expected)


def test_searches_of_an_environment_of_ones_own_have_records(rlkit: Callable[..., Any], run: Path) -> None:
    (run / "own.py").write_text("")
    config = yaml.safe_load((run / "config.yaml").read_text())
    for name in ("packing", "empty"):
        config["envs"][name].update(env="own.py:search", args={"width": 3})
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    output = json.loads(rlkit("records", "first", "--no-draw", "--json").stdout)
    assert [*output["records"]] == ["erdos", "packing"]
    assert "the best published 2.635983084919" in output["known_results"]["packing"]


def test_the_records_of_a_run_verify_too(rlkit: Callable[..., Any], run: Path) -> None:
    (path, *_) = sorted(run.glob("artefacts/erdos/*.record.json"), reverse=True)
    result = rlkit("verify", "erdos", path, "--no-draw")
    assert (result.exit_code, "claimed as value: 0.38087532" in result.stdout) == (0, True)


def test_a_run_without_a_search_has_no_records(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    Simulation(tmp_path / "runs" / "plain", tasks=[Talk(number) for number in range(4)]).train()
    result = rlkit("records", "plain")
    assert result.exit_code == 2
    assert "plain has no `discovery` environment" in result.stderr
