"""A run's episodes are exported for inspect and scout, which read them as the run recorded them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlkit._util import files
from rlkit.cli.app import app
from rlkit.errors import UsageError
from rlkit.store import table
from rlkit.store.history import read_groups, table_path
from rlkit.token_records.pieces import PieceWriter, pieces_path
from rlkit.tools.export_episodes import export_episodes
from rlkit.types import Episode, Group, Tokens
from tests.builders import episode, piece, turn
from tests.interop.frameworks import INSPECT, install, run_program
from tests.trackers.folders import write_run, write_step

FORKED = (
    turn([1, 2, 3], [4, 5], version=7),
    turn([6], [7], parent=0, version=7),
    turn([8, 9], [10, 11, 12], parent=0, version=8),
    turn([13], [14], version=8),
    turn([15], [16], parent=3, version=8),
)
"""A conversation of two turns, another reply to its first turn, and a second conversation of two turns."""


def render(tokens: Tokens) -> str:
    return "".join(f" {token}" for token in tokens)


def write_episodes(path: Path, episodes: Sequence[Episode], *, env: str = "sums") -> None:
    files.make_folder(path.parent)
    turns = [turn for episode in episodes for turn in episode.turns]
    PieceWriter(pieces_path(path.parents[2]), piece).add(
        tokens for turn in turns for tokens in (turn.prompt.tokens, turn.completion)
    )
    group = Group(env, "2+2", 0, tuple(episodes))
    table.write(path, [table.RecordedGroup(group, True, episodes)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a step and an evaluation: a forked rollout that was cut off, a plain one and one that failed."""
    directory = write_run(tmp_path / "first", steps=0, settings={"model": "acme/tiny"})
    forked = replace(episode(0.5, turns=FORKED), status="truncated", metrics={"right": 1.0}, info={"answer": "14"})
    forked = replace(forked, turns=(*FORKED[:-1], replace(FORKED[-1], stop="length")))
    failed = replace(episode(None, member=2, turns=FORKED[:1]), error="the grader died")
    silent = replace(episode(None, member=3), turns=(), error="the sandbox died")
    write_episodes(table_path(directory, 1), [forked, episode(1.0, member=1), failed, silent])
    write_episodes(table_path(directory, 1, kind="evaluation"), [episode(0.0)])
    return directory


def exported_samples(folder: Path, stem: str) -> list[dict[str, Any]]:
    (log,) = folder.glob(f"logs/*_{stem}_*.json")
    return json.loads(log.read_text())["samples"]


def texts(sample: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in sample["messages"]]


def test_messages_are_the_recorded_turns_and_show_where_they_fork(run: Path, tmp_path: Path) -> None:
    assert export_episodes(str(run), tmp_path / "out") == 5
    sample, plain, *_ = exported_samples(tmp_path / "out", "sums-episodes-step-000001")
    assert texts(sample) == [
        ("user", " 1 2 3"),
        ("assistant", " 4 5"),
        ("user", " 6"),
        ("assistant", " 7"),
        ("system", "[turn 2 continues turn 0]"),
        ("user", " 8 9"),
        ("assistant", " 10 11 12"),
        ("system", "[turn 3 begins a new conversation]"),
        ("user", " 13"),
        ("assistant", " 14"),
        ("user", " 15"),
        ("assistant", " 16"),
    ]
    assert sample["messages"][6]["metadata"] == {"turn": 2, "parent": 0, "version": 8, "reward": None}
    assert texts(plain) == [("user", " 1 2"), ("assistant", " 3 4")]


def test_usage_counts_the_whole_prompt_of_each_turn(run: Path, tmp_path: Path) -> None:
    export_episodes(str(run), tmp_path / "out")
    sample, *_ = exported_samples(tmp_path / "out", "sums-episodes-step-000001")
    prompts = [3, 3 + 2 + 1, 3 + 2 + 2, 1, 1 + 1 + 1]
    assert sample["model_usage"] == {
        "acme/tiny": {"input_tokens": sum(prompts), "output_tokens": 8, "total_tokens": sum(prompts) + 8}
    }


def test_a_failed_episode_has_its_error_and_no_score(run: Path, tmp_path: Path) -> None:
    export_episodes(str(run), tmp_path / "out")
    samples = exported_samples(tmp_path / "out", "sums-episodes-step-000001")
    assert [sample["scores"] for sample in samples] == [
        {"right": {"value": 1.0}, "reward": {"value": 0.5}},
        {"reward": {"value": 1.0}},
        {},
        {},
    ]
    assert [sample["error"] and sample["error"]["message"] for sample in samples[1:]] == [
        None,
        "the grader died",
        "the sandbox died",
    ]


def test_a_log_names_the_reward_first_and_lasts_as_long_as_its_longest_episode(run: Path, tmp_path: Path) -> None:
    export_episodes(str(run), tmp_path / "out")
    (path,) = (tmp_path / "out").glob("logs/*_sums-episodes-step-000001_*.json")
    log = json.loads(path.read_text())
    assert [score["name"] for score in log["results"]["scores"]] == ["reward", "right"]
    start, end = (datetime.fromisoformat(log["stats"][name]) for name in ("started_at", "completed_at"))
    longest_s = max(sample["total_time"] for sample in log["samples"])
    assert abs((end - start).total_seconds() - longest_s) <= 1


def test_a_metric_called_reward_is_kept_beside_the_reward(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "first", steps=0)
    write_episodes(table_path(directory, 1), [replace(episode(0.5), metrics={"reward": 3.0})])
    export_episodes(str(directory), tmp_path / "out")
    (sample,) = exported_samples(tmp_path / "out", "sums-episodes-step-000001")
    assert sample["scores"] == {"reward_metric": {"value": 3.0}, "reward": {"value": 0.5}}


@pytest.mark.slow
def test_inspect_and_scout_read_what_the_run_recorded(run: Path, tmp_path: Path) -> None:
    export_episodes(str(run), tmp_path / "out")
    python = install(tmp_path / "venv", *INSPECT)
    read = run_program(python, "export_program.py", tmp_path / "out", cwd=tmp_path)
    logs, transcripts = read["logs"], read["transcripts"]
    assert set(logs) == {"episodes 1 sums", "evaluations 1 sums"}
    assert logs["episodes 1 sums"]["means"] == {"right": 1.0, "reward": 0.75}
    assert logs["evaluations 1 sums"]["means"] == {"reward": 0.0}
    played, evaluated = read_groups(table_path(run, 1))[0], read_groups(table_path(run, 1, kind="evaluation"))[0]
    recorded = [*played.attempts, *evaluated.attempts]
    samples = {uuid: sample for name in sorted(logs) for uuid, sample in logs[name]["samples"].items()}
    assert len(samples) == len(recorded) == len(transcripts) == 5
    for (uuid, sample), played in zip(samples.items(), recorded, strict=True):
        replies = [text for role, text, _ in sample["messages"] if role == "assistant"]
        prompts = [text for role, text, _ in sample["messages"] if role == "user"]
        assert replies == [render(turn.completion) for turn in played.turns]
        assert prompts == [render(turn.prompt.tokens) for turn in played.turns]
        parents = [metadata["parent"] for role, _, metadata in sample["messages"] if role == "assistant"]
        assert parents == [turn.parent for turn in played.turns]
        scores = {} if played.reward is None else {**played.metrics, "reward": played.reward}
        assert (sample["scores"], sample["error"], sample["seconds"]) == (scores, played.error, played.seconds)
        assert sample["metadata"] == {
            "draw": 0,
            "member": played.member,
            "status": played.status,
            "info": dict(played.info),
        }
        assert (sample["id"], sample["completion"]) == ("2+2", replies[-1] if replies else "")
        transcript = transcripts[uuid]
        assert transcript["messages"] == sample["messages"]
        assert transcript["score"] == (scores or None)
        assert (transcript["error"], transcript["total_time"]) == (played.error, played.seconds)
        assert (transcript["task_set"], transcript["task_id"], transcript["model"]) == ("sums", "2+2", "acme/tiny")
        assert transcript["task_repeat"] == sample["epoch"] == played.member + 1
        assert transcript["total_tokens"] == sum(sample["tokens"][0])
    assert next(iter(samples.values()))["stops"] == ["max_tokens"]


def test_episodes_of_an_interrupted_export_leave_no_folder(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", fail)
    with pytest.raises(UsageError, match="out cannot be written: No space left on device"):
        export_episodes(str(run), tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_secrets_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "an-own-secret-of-this-test")
    directory = write_run(tmp_path / "first", steps=0)
    write_step(directory, 1, text="I found an-own-secret-of-this-test", info={"key": "an-own-secret-of-this-test"})
    export_episodes(str(directory), tmp_path / "out")
    exported = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(exported) == 3
    assert not [path for path in exported if b"own-secret-of-this-test" in path.read_bytes()]


def test_the_command_exports_episodes(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["export", str(run), "--episodes", "inspect", "--to", str(tmp_path / "out"), "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["episodes"] == 5
    assert len(list((tmp_path / "out" / "logs").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--episodes", "inspect", "--best"], "--best and --merged select weights: leave them out with --episodes"),
        (["--episodes", "docent"], "--episodes docent is no form of episodes: write --episodes inspect"),
    ],
)
def test_options_without_effect_are_an_error(run: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["export", str(run), "--to", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_step_has_nothing_to_export(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "first", steps=0)
    with pytest.raises(UsageError, match="first has no episodes to export"):
        export_episodes(str(directory), tmp_path / "out")
