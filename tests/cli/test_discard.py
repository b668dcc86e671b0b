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
from rlkit.store import checkpoints
from rlkit.testing import byte_model
from rlkit.tinker_client.stored_checkpoint import StoredCheckpoint
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
class SavedRun:
    server: EngineServer
    directory: Path
    checkpoints: Sequence[toolkit.Checkpoint]

    def paths(self, *steps: int) -> set[str]:
        return {
            path
            for checkpoint in self.checkpoints
            if checkpoint.step in steps
            for path in (checkpoint.state, checkpoint.sampler)
        }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SavedRun]:
    """Three checkpoints of a run named first."""
    with EngineServer(threads=1, device="cpu", root=tmp_path / "engine") as server:
        monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", server.api_key)
        train(model, steps=3)
        directory = tmp_path / "runs" / "first"
        yield SavedRun(server, directory, checkpoints(directory))


def list_paths(rlkit: Command) -> set[str]:
    return {row["path"] for row in json.loads(rlkit("checkpoints", "list", "--json").stdout)}


def test_checkpoints_are_deleted_only_after_confirmation(run: SavedRun, rlkit: Command) -> None:
    all_paths = run.paths(1, 2, 3)
    assert list_paths(rlkit) == all_paths

    preview = rlkit("checkpoints", "delete", "first", "--dry-run")
    assert preview.exit_code == 0
    assert "6 checkpoints of " in preview.stdout
    assert preview.stdout.rstrip().endswith("MiB would be deleted")
    refused = rlkit("checkpoints", "delete", "first")
    assert refused.exit_code == 2
    assert "Nobody can answer without a terminal: add --yes" in refused.stderr
    assert all(path in refused.stderr for path in all_paths)
    assert rlkit("checkpoints", "delete").exit_code == 2
    assert list_paths(rlkit) == all_paths

    checkpoint = run.checkpoints[0]
    assert rlkit("checkpoints", "delete", checkpoint.sampler, "--yes").exit_code == 0
    result = json.loads(rlkit("checkpoints", "delete", checkpoint.state, "--yes", "--json").stdout)
    assert (result["changed_count"], [row["path"] for row in result["checkpoints"]]) == (1, [checkpoint.state])
    assert list_paths(rlkit) == run.paths(2, 3)
    assert [checkpoint.step for checkpoint in checkpoints(run.directory)] == [2, 3]
    assert rlkit("checkpoints", "delete", checkpoint.state, "--yes").exit_code == 2  # it is gone

    assert rlkit("checkpoints", "delete", "first", "--kind", "sampler", "--yes").exit_code == 0
    assert list_paths(rlkit) == {checkpoint.state for checkpoint in run.checkpoints[1:]}
    assert "there is no such" in rlkit("checkpoints", "delete", "--all", "--older-than", "1h", "--yes").stdout
    deletion = rlkit("checkpoints", "delete", "--all", "--yes")
    assert "2 checkpoints of " in deletion.stdout
    assert list_paths(rlkit) == set()
    assert checkpoints(run.directory) == []


@pytest.mark.parametrize(("answer", "remaining"), [("y\n", 0), ("yes\n", 0), ("\n", 6), ("n\n", 6), ("", 6)])
def test_delete_asks_for_confirmation(
    answer: str, remaining: int, run: SavedRun, rlkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = StringIO(answer)
    monkeypatch.setattr(typed, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("rlkit.cli.common.output.sys", SimpleNamespace(stdin=typed))
    result = rlkit("checkpoints", "delete", "--all")
    assert result.exit_code == 0
    assert "permanently? [y/N]" in result.stderr
    assert len(list_paths(rlkit)) == remaining


def test_prune_keeps_recent_and_best_checkpoints_and_the_run_resumes(
    run: SavedRun, rlkit: Command, model: Path
) -> None:
    metrics = (json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines())
    fastest = min(metrics, key=lambda line: line["time/step_s"])["step"]
    assert rlkit("checkpoints", "prune", "first", "--keep-last", "3", "--yes").stdout == "there is no such checkpoint\n"
    assert rlkit("checkpoints", "prune", "first", "--keep-best", "1", "--yes").exit_code == 0
    assert list_paths(rlkit) == run.paths(3, fastest)
    assert rlkit("checkpoints", "prune", "first", "--keep-best", "0", "--yes").exit_code == 0
    assert list_paths(rlkit) == run.paths(3)
    assert train(model, steps=4, resume=True).steps == 4


def test_ttl_changes_the_expiry_on_the_service_and_in_the_run(run: SavedRun, rlkit: Command) -> None:
    assert rlkit("checkpoints", "ttl", "first").exit_code == 2
    assert "6 checkpoints" in rlkit("checkpoints", "ttl", "first", "--days", "90", "--dry-run").stdout
    (changed,) = json.loads(rlkit("checkpoints", "ttl", run.checkpoints[0].state, "--days", "90", "--json").stdout)[
        "checkpoints"
    ]
    assert changed["expires"] == pytest.approx(time.time() + 90 * 86400, abs=600)
    ends = {row["path"]: row["expires"] for row in json.loads(rlkit("checkpoints", "list", "--json").stdout)}
    assert ends[run.checkpoints[0].state] == pytest.approx(time.time() + 90 * 86400, abs=600)
    assert ends[run.checkpoints[1].state] == pytest.approx(time.time() + 30 * 86400, abs=600)
    recorded = checkpoints(run.directory)
    assert [checkpoint.step for checkpoint in recorded] == [1, 2, 3]
    assert recorded[0].expires == pytest.approx(ends[run.checkpoints[0].state], abs=60)
    assert rlkit("checkpoints", "ttl", "--all", "--never").exit_code == 0
    assert {row["expires"] for row in json.loads(rlkit("checkpoints", "list", "--json").stdout)} == {None}
    assert {checkpoint.expires for checkpoint in checkpoints(run.directory)} == {None}


@pytest.mark.parametrize("arguments", [["ttl", "--never"], ["ttl", "--days", "2", "--dry-run"], ["delete", "--yes"]])
@pytest.mark.parametrize("more", [[], ["--kind", "sampler"]])
def test_a_checkpoint_that_the_service_does_not_have_is_named(
    run: SavedRun, rlkit: Command, arguments: list[str], more: list[str]
) -> None:
    result = rlkit("checkpoints", arguments[0], "tinker://a/weights/b", *arguments[1:], *more)
    assert result.exit_code == 2
    assert "the service has no checkpoint tinker://a/weights/b" in result.stderr


def test_show_prints_all_details_of_a_checkpoint(run: SavedRun, rlkit: Command, model: Path) -> None:
    details = json.loads(rlkit("checkpoints", "show", "first", "--step", "2", "--json").stdout)
    assert (details["run"], details["step"], details["path"]) == ("first", 2, run.checkpoints[1].state)
    assert (details["sampler"], details["kind"], details["model"]) == (
        run.checkpoints[1].sampler,
        "training",
        str(model),
    )
    assert details["size_bytes"] > 1000
    text = rlkit("checkpoints", "show", run.checkpoints[1].sampler).stdout
    assert "kind     sampler" in text
    assert "expires  20" in text
    assert rlkit("checkpoints", "show", "tinker://x:train:0/weights/a").exit_code == 2


def test_downloaded_files_equal_those_of_the_service(run: SavedRun, rlkit: Command, tmp_path: Path) -> None:
    result = rlkit("checkpoints", "download", "first", tmp_path / "files", "--json")
    assert json.loads(result.stdout)["form"] == "raw"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "files").iterdir()
    }
    assert rlkit("checkpoints", "download", "first", tmp_path / "files").exit_code == 2


@pytest.mark.parametrize("page_size", [1, 2, 4, 6, 7])
def test_list_reads_every_page_of_checkpoints(
    page_size: int, run: SavedRun, rlkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tinker

    list_checkpoints = tinker.RestClient.list_user_checkpoints

    def list_fewer(self: tinker.RestClient, limit: int, offset: int) -> Any:
        return list_checkpoints(self, limit=min(limit, page_size), offset=offset)

    monkeypatch.setattr(tinker.RestClient, "list_user_checkpoints", list_fewer)
    assert list_paths(rlkit) == run.paths(1, 2, 3)


def test_failed_deletion_is_reported_and_the_rest_is_deleted(
    run: SavedRun, rlkit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlkit.tinker_client.sdk import TinkerService

    delete = TinkerService.delete

    async def refuses_one(self: TinkerService, path: str) -> None:
        if path == run.checkpoints[1].state:
            raise ServiceError(f"deleting {path}: it is busy")
        await delete(self, path)

    monkeypatch.setattr(TinkerService, "delete", refuses_one)
    result = rlkit("checkpoints", "delete", "first", "--yes")
    assert result.exit_code == 1
    assert "it is busy" in result.stderr
    assert list_paths(rlkit) == {run.checkpoints[1].state}
    assert [checkpoint.step for checkpoint in checkpoints(run.directory)] == [2]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400.0), ("12h", 43200.0), ("7d", 604800.0), ("2 w", 1209600.0), ("0.5h", 1800.0)]
)
def test_ages_are_parsed(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["7", "d", "-1d", "1y", "seven days", ""])
def test_malformed_age_is_an_error_of_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="is not an age: write 90m, 12h, 7d or 2w"):
        parse_age(text)


def test_a_filter_takes_kinds_and_ages() -> None:
    every = [
        StoredCheckpoint("a", "training", 100.0),
        StoredCheckpoint("b", "sampler", 100.0),
        StoredCheckpoint("c", "training", 900.0),
    ]
    assert [checkpoint.path for checkpoint in CheckpointFilter(now=1000.0).select(every)] == ["a", "b", "c"]
    assert [checkpoint.path for checkpoint in CheckpointFilter("training", now=1000.0).select(every)] == ["a", "c"]
    assert [checkpoint.path for checkpoint in CheckpointFilter(min_age_s=500.0, now=1000.0).select(every)] == ["a", "b"]
    with pytest.raises(UsageError, match="--kind: 'sampling' is not one of training, sampler, external"):
        CheckpointFilter.parse("sampling", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["delete"], "name runs or tinker:// paths, or use --all"),
        (["delete", "nonsense", "--yes"], "there is no run 'nonsense'"),
        (["delete", "tinker://a/weights/b", "--all"], "--all selects every checkpoint of the account"),
        (["ttl", "tinker://a/weights/b"], "give the time of expiry: --days N, or --never"),
        (["ttl", "tinker://a/weights/b", "--days", "2", "--never"], "give the time of expiry"),
        (["list", "--older-than", "soon"], "'soon' is not an age"),
    ],
)
def test_contradictory_arguments_are_an_error(arguments: list[str], message: str, rlkit: Command) -> None:
    result = rlkit("checkpoints", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
