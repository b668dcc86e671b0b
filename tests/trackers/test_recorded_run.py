from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.errors import UsageError
from rlkit.trackers.recorded_run import StepReader, read_run
from rlkit.trackers.wandb import render_page
from tests.trackers.folders import MESSAGES, add_metrics, write_run, write_step, write_table


def test_steps_are_read_once_in_order(tmp_path: Path) -> None:
    feed = StepReader(write_run(tmp_path / "run"))
    assert [step.number for step in feed.steps(has_ended=False)] == [0, 1, 2, 3]
    assert list(feed.steps(has_ended=False)) == []
    write_step(tmp_path / "run", 4)
    (step,) = feed.steps(has_ended=False)
    assert step.metrics == {"env/sums/reward/mean": 0.4, "env/all/reward/mean": 0.4, "time/step_s": 1.5}


def test_steps_sent_before_are_skipped(tmp_path: Path) -> None:
    feed = StepReader(write_run(tmp_path / "run"), after=1)
    assert [step.number for step in feed.steps(has_ended=True)] == [2, 3]


def test_step_without_a_table_is_deferred_while_the_run_continues(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1)
    add_metrics(directory, 2)
    feed = StepReader(directory)
    assert [step.number for step in feed.steps(has_ended=False)] == [0, 1]
    assert [step.number for step in feed.steps(has_ended=False)] == []
    write_table(directory, 2)
    assert [step.number for step in feed.steps(has_ended=False)] == [2]
    add_metrics(directory, 3)
    (last,) = feed.steps(has_ended=True)
    assert (last.number, last.rollouts()) == (3, [])


def test_incomplete_line_is_deferred(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')
        file.flush()
        feed = StepReader(directory)
        assert [step.number for step in feed.steps(has_ended=True)] == [0, 1]
        file.write(": 1.0}\n")
    assert [step.metrics for step in feed.steps(has_ended=True)] == [{"x": 1.0}]


def test_damaged_metrics_are_named(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=0)
    (directory / "metrics.jsonl").write_text("[]\n")
    with pytest.raises(UsageError, match=r"metrics\.jsonl is damaged"):
        list(StepReader(directory).steps(has_ended=True))


def test_rollouts_are_the_last_attempts_as_text(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=0)
    write_step(directory, 1, info={"messages": MESSAGES})
    *_, step = StepReader(directory).steps(has_ended=True)
    rollouts = step.rollouts()
    assert [(rollout.env, rollout.task, rollout.member, rollout.reward) for rollout in rollouts] == [
        ("sums", "2+2", 0, 1.0),
        ("sums", "2+2", 1, 0.0),
        ("sums", "2+2", 2, 0.5),
        ("others", "cats", 0, 1.0),
    ]
    assert rollouts[0].text == "what is 2+2? four"
    assert rollouts[0].info["messages"] == MESSAGES
    page = render_page(rollouts[0], 1)
    assert "what is 2+2?" in page
    assert "step 1 · sums · 2+2 · completed · reward 1" in page


def test_text_of_a_rollout_is_escaped_on_its_page(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=0)
    write_step(directory, 1, text="</pre><script>alert(1)</script>")
    *_, step = StepReader(directory).steps(has_ended=True)
    assert "<script" not in render_page(step.rollouts()[0], 1)


def test_the_same_rollouts_are_drawn_each_time(tmp_path: Path) -> None:
    *_, step = StepReader(write_run(tmp_path / "run")).steps(has_ended=True)
    assert step.sample_rollouts(2) == step.sample_rollouts(2)
    assert len(step.sample_rollouts(2)) == 2
    assert step.sample_rollouts(0) == step.sample_rollouts(9) == step.rollouts()


def test_rollouts_and_run_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_TOKEN", "canary-of-the-environment")
    directory = write_run(tmp_path / "run", steps=0, settings={"model": "canary-of-the-environment"})
    secrets = "canary-of-the-environment and sk-0123456789abcdef0123"
    write_step(directory, 1, text=secrets, info={"messages": [{"role": "user", "content": secrets}]})
    *_, step = StepReader(directory).steps(has_ended=True)
    everything = f"{read_run(directory)}{step.rollouts()}"
    assert "canary" not in everything
    assert "sk-0123" not in everything
    assert read_run(directory).model == "***"


def test_run_is_described_from_its_folder(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", status="failed", settings={"lora": {"rank": 7}}))
    assert (run.name, run.status, run.lora_rank) == ("run", "failed", 7)
    assert run.config["steps"] == 100
