"""The lines that `rlkit train` prints at the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit.cli.train import _summary
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.schema import Config, EnvConfig
from rlkit.config.schema.sampling import SamplingConfig
from rlkit.store import RunStore, table
from rlkit.store.history import table_path
from rlkit.token_records.pieces import PieceWriter, pieces_path
from rlkit.trackers import RunResult
from rlkit.types import Checkpoint, Group, Message, TokenPiece
from tests.builders import episode, turn


@pytest.mark.parametrize(
    ("scores", "is_noted"), [([0.5, 0.25, 0.375], True), ([0.5, 0.25, 0.5], False), ([0.5], False)]
)
def test_an_ending_says_if_no_evaluation_was_as_good_as_the_first(
    tmp_path: Path, scores: list[float], is_noted: bool
) -> None:
    lines = [json.dumps({"step": step, "eval/sums/reward/mean": score}) for step, score in enumerate(scores)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    text = _summary(RunResult("first", tmp_path, "completed", len(scores)))
    assert ("no later evaluation was as good as the first one, 0.50" in text) is is_noted


def test_an_ending_counts_the_rollouts_that_failed(tmp_path: Path) -> None:
    steps = [{"eval/all/failed": 2.0}, {"env/w/failed": 1.0, "eval/all/failed": 2.0}, {"env/w/failed": 0.0}]
    lines = [json.dumps({"step": step, **metrics}) for step, metrics in enumerate(steps)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    text = _summary(RunResult("first", tmp_path, "completed", 2))
    assert "failed        rollouts: 1 in training, 4 in evaluations\n" in text
    (tmp_path / "metrics.jsonl").write_text(lines[2] + "\n")
    assert "failed" not in _summary(RunResult("first", tmp_path, "completed", 2))


@pytest.mark.parametrize(
    ("messages", "hint"),
    [((), "rlkit chat RUN --complete --max-tokens 7\n              its prompts are texts, such as '1 + 1'\n"),
     (({"role": "user", "content": "1 + 1"},), "rlkit chat RUN\n")],
)  # fmt: skip
def test_an_ending_says_how_to_talk_to_a_run_whose_prompts_are_texts(
    tmp_path: Path, messages: tuple[Message, ...], hint: str
) -> None:
    config = Config(envs={"arithmetic": EnvConfig()}, sampling=SamplingConfig(max_tokens=7))
    run = tmp_path / "run"
    with RunStore(run, resolved=ResolvedConfig.from_python(config)) as store:
        store.metadata.set_status("completed")
    asked = turn([*b"1 + 1"], [*b" = 2"], messages=messages)
    group = Group("arithmetic", "1+1", 0, (episode(1.0, turns=[asked]),))
    table.write(table_path(run, 1), [table.RecordedGroup(group, True, group.episodes)])
    PieceWriter(pieces_path(run), lambda token: TokenPiece(bytes([token]), False)).add([asked.prompt.tokens])
    result = RunResult("run", run, "completed", 1, checkpoint=Checkpoint(1, "tinker://a", "tinker://b", expires=None))
    assert hint.replace("RUN", str(run)) in _summary(result)
