"""Killed runs that are resumed train on exactly what they would have trained on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.marks import split_slow

from .killing import MOMENTS, Doom, Request

EXHAUSTIVE = os.environ.get("RLKIT_TEST_EXHAUSTIVE") == "1"

type Killed = Callable[..., dict[str, Any]]
STRICT = {"mode": "async", "max_staleness": 1, "staleness": "strict"}
SCHEDULES = {
    "sync": {},
    "stream": {"mode": "stream"},
    "async1": STRICT,
    "async4": {**STRICT, "max_staleness": 4},
    "warm start": {"warm_start": 3},  # and a teacher after it
}

pytestmark = pytest.mark.timeout(3600 if EXHAUSTIVE else 600)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    """Asks `tests.resume.killing`, which imports everything once, for runs that are killed; 50 if exhaustive."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.resume.killing"]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines, requests = process.stdout, process.stdin
        assert json.loads(lines.readline()) == "ready"

        def ask(schedule: Any, *, kills: int = 0, dooms: Sequence[Doom] = ()) -> dict[str, Any]:
            root = str(tmp_path_factory.mktemp("killed") / "runs")
            request = Request(root, schedule, 50 if EXHAUSTIVE and kills else kills, list(dooms))
            requests.write(json.dumps(asdict(request)) + "\n")
            requests.flush()
            answer = lines.readline()
            assert answer, "the program ended; what it printed says why"
            return json.loads(answer)

        yield ask
        requests.close()


def assert_same(answer: dict[str, Any], *, metrics: bool) -> None:
    """Every killed run trained on what the whole one did, and sampled again only what was in flight."""
    uninterrupted = answer["whole"]
    assert uninterrupted["weights"][-1] is not None
    for run in answer["killed"]:
        assert run["trained"] == uninterrupted["trained"]
        assert (
            run["weights"] == uninterrupted["weights"]
        )  # the simulated weights remember all that they were trained on
        assert run["played twice"] == []
        assert run["left"] == []
        assert run["checkpoints"][-1] == uninterrupted["checkpoints"][-1]
        assert run["samples"] - uninterrupted["samples"] <= run["lost"]  # only rollouts in flight are sampled again
        for line, expected in zip(run["metrics"], uninterrupted["metrics"], strict=True):
            if metrics:
                assert line == pytest.approx(expected, rel=1e-12)
            assert line.get("service/loss:sum") == pytest.approx(expected.get("service/loss:sum"), rel=1e-12)


@pytest.mark.parametrize("name", split_slow(SCHEDULES, lambda name: name == "warm start"))
def test_killed_run_trains_like_an_uninterrupted_one(name: str, killed: Killed) -> None:
    # With async the weights that a rollout began with depend on timing, and so do some of the numbers.
    answer = killed(SCHEDULES[name], kills=4)
    assert all(run["deaths"] for run in answer["killed"])
    assert_same(answer, metrics=name in ("sync", "stream", "warm start"))


@pytest.mark.parametrize("name", split_slow(["sync", "async4", "warm start"], lambda name: name == "sync"))
def test_run_killed_around_a_checkpoint_gives_the_same_numbers(name: str, killed: Killed) -> None:
    numbers = (1, 2, 3) if EXHAUSTIVE else (2,)
    moments = MOMENTS if EXHAUSTIVE or name == "sync" else ("half made", "made")
    answer = killed(SCHEDULES[name], dooms=[Doom(checkpoint=(at, number)) for at in moments for number in numbers])
    assert all(run["deaths"] == 1 for run in answer["killed"])
    assert_same(answer, metrics=name != "async4")


@pytest.mark.parametrize("name", split_slow(["sync", "async4"], lambda name: name == "async4"))
def test_run_with_a_torn_last_record_gives_the_same_numbers(name: str, killed: Killed) -> None:
    shares = (0.0, 0.02, 0.05, 0.3, 0.5, 0.8, 1.0) if EXHAUSTIVE else (0.05, 1.0) if name == "sync" else (0.8,)
    places = [("DRAW", 5), ("EPISODE", 9), ("STEP", 2), *([("STEP", 1), ("STEP", 6)] if EXHAUSTIVE else [])]
    answer = killed(SCHEDULES[name], dooms=[Doom(record=place, cut=share) for place in places for share in shares])
    assert all(run["deaths"] == 1 for run in answer["killed"])
    assert_same(answer, metrics=name == "sync")


@pytest.mark.slow
def test_killed_paced_run_trains_each_group_once(killed: Killed) -> None:
    answer = killed({"mode": "async", "max_staleness": 2}, kills=4)
    for run in answer["killed"]:
        assert run["played twice"] == []
        assert run["samples"] - answer["whole"]["samples"] <= run["lost"] + 24  # which groups come last may differ
        steps_and_tasks = [(step, task) for step, rows in enumerate(run["trained"]) for task, _, _, _ in rows]
        assert len({task for _, task in steps_and_tasks}) == len(set(steps_and_tasks))  # no task is in two steps
        assert all(sum(counts for *_, counts in rows) == 12 for rows in run["trained"])


@pytest.mark.slow
def test_killed_run_on_the_engine_gives_the_same_numbers(killed: Killed) -> None:
    moments = MOMENTS if EXHAUSTIVE else ("asked for", "made")
    answer = killed("engine", kills=2, dooms=[Doom(checkpoint=(at, 1)) for at in moments])
    for run in answer["killed"]:
        assert run["played twice"] == []
        assert run["trained"] == answer["whole"]["trained"]
        assert run["metrics"] == answer["whole"]["metrics"]
