"""Checkpoints are shown, deleted, given an end and downloaded, on the embedded engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlkit as toolkit
from rlkit.engine import EngineServer
from rlkit.errors import ServiceError, UsageError
from rlkit.service import StoredCheckpoint
from rlkit.store import checkpoints
from rlkit.testing import byte_model
from rlkit.tools.checkpoints import CheckpointFilter, parse_age

type Command = Callable[..., Any]


class Bytes(toolkit.SingleTurnEnv):
    """The share of the reply's bytes that are below 128."""

    def prompt(self) -> str:
        return "?"

    def grade(self, reply: toolkit.Reply) -> float:
        return float(np.mean(reply.turn.completion < 128))


def train(model: Path, *, steps: int, resume: bool = False) -> toolkit.RunResult:
    return toolkit.train(
        model=str(model),
        name="first",
        envs=[Bytes()],
        steps=steps,
        batch={"groups": 1, "group_size": 2},
        sampling={"max_tokens": 2},
        checkpoint={"every": 1},
        best={"metric": "time/step_s", "lower_is_better": True},
        lora={"rank": 2},
        trackers=[],
        resume=resume,
    )


@dataclass(frozen=True)
class Saved:
    server: EngineServer
    directory: Path
    saved: Sequence[toolkit.Checkpoint]

    def paths(self, *steps: int) -> set[str]:
        return {path for one in self.saved if one.step in steps for path in (one.state, one.sampler)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saved]:
    """Three checkpoints of a run named first."""
    with EngineServer(threads=1, device="cpu", root=tmp_path / "engine") as server:
        monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", server.api_key)
        train(model, steps=3)
        directory = tmp_path / "runs" / "first"
        yield Saved(server, directory, checkpoints(directory))


def kept(rlkit: Command) -> set[str]:
    return {row["path"] for row in json.loads(rlkit("checkpoints", "list", "--json").stdout)}


def test_checkpoints_are_deleted_with_what_belongs_to_them_and_only_after_a_yes(run: Saved, rlkit: Command) -> None:
    everything = run.paths(1, 2, 3)
    assert kept(rlkit) == everything

    shown = rlkit("checkpoints", "delete", "first", "--dry-run")
    assert shown.exit_code == 0
    assert "6 checkpoints of " in shown.stdout
    assert shown.stdout.rstrip().endswith("MiB would be deleted")
    refused = rlkit("checkpoints", "delete", "first")
    assert refused.exit_code == 2
    assert "Cannot ask without a terminal: give --yes" in refused.stderr
    assert all(path in refused.stderr for path in everything)
    assert rlkit("checkpoints", "delete").exit_code == 2
    assert kept(rlkit) == everything

    one = run.saved[0]
    assert rlkit("checkpoints", "delete", one.sampler, "--yes").exit_code == 0
    result = json.loads(rlkit("checkpoints", "delete", one.state, "--yes", "--json").stdout)
    assert (result["changed_count"], [row["path"] for row in result["checkpoints"]]) == (1, [one.state])
    assert kept(rlkit) == run.paths(2, 3)
    assert [saved.step for saved in checkpoints(run.directory)] == [2, 3]
    assert rlkit("checkpoints", "delete", one.state, "--yes").exit_code == 2  # it is gone

    assert rlkit("checkpoints", "delete", "first", "--kind", "sampler", "--yes").exit_code == 0
    assert kept(rlkit) == {saved.state for saved in run.saved[1:]}
    assert "there is no such" in rlkit("checkpoints", "delete", "--all", "--older-than", "1h", "--yes").stdout
    done = rlkit("checkpoints", "delete", "--all", "--yes")
    assert "2 checkpoints of " in done.stdout
    assert kept(rlkit) == set()
    assert checkpoints(run.directory) == []


@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("yes\n", 0), ("\n", 6), ("n\n", 6), ("", 6)])
def test_a_person_is_asked(answer: str, left: int, run: Saved, rlkit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = StringIO(answer)
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("rlkit.cli.checkpoints.sys", SimpleNamespace(stdin=typed))
    result = rlkit("checkpoints", "delete", "--all")
    assert result.exit_code == 0
    assert "permanently? [y/N]" in result.stderr
    assert len(kept(rlkit)) == left


def test_what_is_neither_new_nor_good_is_pruned_and_the_run_goes_on_from_what_is_left(
    run: Saved, rlkit: Command, model: Path
) -> None:
    metrics = (json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines())
    fastest = min(metrics, key=lambda line: line["time/step_s"])["step"]
    assert rlkit("checkpoints", "prune", "first", "--keep-last", "3", "--yes").stdout == "there is no such checkpoint\n"
    assert rlkit("checkpoints", "prune", "first", "--keep-best", "1", "--yes").exit_code == 0
    assert kept(rlkit) == run.paths(3, fastest)
    assert rlkit("checkpoints", "prune", "first", "--keep-best", "0", "--yes").exit_code == 0
    assert kept(rlkit) == run.paths(3)
    assert train(model, steps=4, resume=True).steps == 4


def test_a_checkpoint_gets_another_end_and_the_run_knows_it(run: Saved, rlkit: Command) -> None:
    assert rlkit("checkpoints", "ttl", "first").exit_code == 2
    assert "6 checkpoints" in rlkit("checkpoints", "ttl", "first", "--days", "90", "--dry-run").stdout
    (changed,) = json.loads(rlkit("checkpoints", "ttl", run.saved[0].state, "--days", "90", "--json").stdout)[
        "checkpoints"
    ]
    assert changed["expires"] == pytest.approx(time.time() + 90 * 86400, abs=600)
    ends = {row["path"]: row["expires"] for row in json.loads(rlkit("checkpoints", "list", "--json").stdout)}
    assert ends[run.saved[0].state] == pytest.approx(time.time() + 90 * 86400, abs=600)
    assert ends[run.saved[1].state] == pytest.approx(time.time() + 30 * 86400, abs=600)
    known = checkpoints(run.directory)
    assert [saved.step for saved in known] == [1, 2, 3]
    assert known[0].expires == pytest.approx(ends[run.saved[0].state], abs=60)
    assert rlkit("checkpoints", "ttl", "--all", "--never").exit_code == 0
    assert {row["expires"] for row in json.loads(rlkit("checkpoints", "list", "--json").stdout)} == {None}
    assert {saved.expires for saved in checkpoints(run.directory)} == {None}


def test_all_that_is_known_of_a_checkpoint_is_shown(run: Saved, rlkit: Command, model: Path) -> None:
    shown = json.loads(rlkit("checkpoints", "show", "first", "--step", "2", "--json").stdout)
    assert (shown["run"], shown["step"], shown["path"]) == ("first", 2, run.saved[1].state)
    assert (shown["sampler"], shown["kind"], shown["model"]) == (run.saved[1].sampler, "training", str(model))
    assert shown["size_bytes"] > 1000
    text = rlkit("checkpoints", "show", run.saved[1].sampler).stdout
    assert "kind     sampler" in text
    assert "expires  20" in text
    assert rlkit("checkpoints", "show", "tinker://x:train:0/weights/a").exit_code == 2


def test_the_files_are_downloaded_as_the_service_has_them(run: Saved, rlkit: Command, tmp_path: Path) -> None:
    result = rlkit("checkpoints", "download", "first", tmp_path / "files", "--json")
    assert json.loads(result.stdout)["form"] == "raw"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "files").iterdir()
    }
    assert rlkit("checkpoints", "download", "first", tmp_path / "files").exit_code == 2


@pytest.mark.parametrize("given", [1, 2, 4, 6, 7])
def test_every_page_of_checkpoints_is_read_whatever_a_service_gives_at_once(
    given: int, run: Saved, rlkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tinker

    whole = tinker.RestClient.list_user_checkpoints

    def less(self: tinker.RestClient, limit: int, offset: int) -> Any:
        return whole(self, limit=min(limit, given), offset=offset)

    monkeypatch.setattr(tinker.RestClient, "list_user_checkpoints", less)
    assert kept(rlkit) == run.paths(1, 2, 3)


def test_what_cannot_be_deleted_is_told_and_the_rest_is_deleted(
    run: Saved, rlkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlkit.service.sdk import TinkerService

    delete = TinkerService.delete

    async def refuses_one(self: TinkerService, path: str) -> None:
        if path == run.saved[1].state:
            raise ServiceError(f"deleting {path}: it is busy")
        await delete(self, path)

    monkeypatch.setattr(TinkerService, "delete", refuses_one)
    result = rlkit("checkpoints", "delete", "first", "--yes")
    assert result.exit_code == 1
    assert "it is busy" in result.stderr
    assert kept(rlkit) == {run.saved[1].state}
    assert [saved.step for saved in checkpoints(run.directory)] == [2]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400.0), ("12h", 43200.0), ("7d", 604800.0), ("2 w", 1209600.0), ("0.5h", 1800.0)]
)
def test_an_age_is_read(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["7", "d", "-1d", "1y", "seven days", ""])
def test_what_is_no_age_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="is not an age: write 90m, 12h, 7d or 2w"):
        parse_age(text)


def test_a_filter_takes_kinds_and_ages() -> None:
    every = [
        StoredCheckpoint("a", "training", 100.0),
        StoredCheckpoint("b", "sampler", 100.0),
        StoredCheckpoint("c", "training", 900.0),
    ]
    assert [one.path for one in CheckpointFilter(now=1000.0).select(every)] == ["a", "b", "c"]
    assert [one.path for one in CheckpointFilter("training", now=1000.0).select(every)] == ["a", "c"]
    assert [one.path for one in CheckpointFilter(min_age_s=500.0, now=1000.0).select(every)] == ["a", "b"]
    with pytest.raises(UsageError, match="--kind: 'sampling' is not one of training, sampler, external"):
        CheckpointFilter.parse("sampling", None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["delete"], "name runs or tinker:// paths, or use --all"),
        (["delete", "nonsense", "--yes"], "there is no run 'nonsense'"),
        (["delete", "tinker://a/weights/b", "--all"], "--all selects every checkpoint of the account"),
        (["ttl", "tinker://a/weights/b"], "give the time of expiry: --days N, or --never"),
        (["ttl", "tinker://a/weights/b", "--days", "2", "--never"], "give the time of expiry"),
        (["list", "--older-than", "soon"], "'soon' is not an age"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: list[str], told: str, rlkit: Command) -> None:
    result = rlkit("checkpoints", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
