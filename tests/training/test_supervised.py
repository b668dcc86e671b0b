"""Supervised steps and warm starts, through the real Tinker SDK, on the embedded engine with a small real model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlkit
from rlkit.algorithms.losses import PPO
from rlkit.config.loading.load import load_config
from rlkit.config.loading.resolved import show_lines
from rlkit.config.loading.targets import load_target
from rlkit.dry_run.rehearse import rehearse
from rlkit.engine.model.model_files import load_tokenizer
from rlkit.envs.demonstrations import Conversation, demonstrations
from rlkit.errors import ConfigError, EnvironmentFault, UsageError
from rlkit.policy import Limits
from rlkit.store.history import read_groups, read_metrics, table_path
from rlkit.testing import tiny_model
from rlkit.token_records.updates import read_update, update_path
from rlkit.tools.export_episodes import export_episodes
from rlkit.training.from_config import make_preparation
from rlkit.training.trainer import RLTrainer
from rlkit.types import Sampling, Turn
from rlkit.view.run_reader import RunReader
from tests.training.test_teachers import assert_trained_exactly_once, score

TALKS = [("one", "1"), ("two", "2"), ("six", "6"), ("ten", "10")]


@dataclass(frozen=True)
class Number(rlkit.SingleTurnEnv):
    """A number to write in digits; other replies differ a little, too."""

    word: str
    digits: str

    def prompt(self) -> list[rlkit.Message]:
        return [{"role": "user", "content": self.word}]

    def grade(self, reply: rlkit.Reply) -> float:
        digits = sum(character.isdigit() for character in reply.text)
        return digits / 4 + int(reply.turn.completion.sum()) % 8 / 1024


TASKS = [Number(*pair) for pair in TALKS]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": digits}]}
        for word, digits in TALKS
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_settings(model: Path, **more: object) -> Mapping[str, object]:
    return {
        "model": str(model),
        "batch": {"groups": 4} if "source" in more else {"groups": 4, "group_size": 4},
        "sampling": {"max_tokens": 4, "stop": ["\x00"]},
        "optimizer": {"learning_rate": 1e-2},
        "lora": {"rank": 16, "train_unembed": True},
        "service": {"engine_threads": 1},
        **more,
    }


def train(settings: Mapping[str, object], *, directory: Path | None = None, resume: bool = False) -> rlkit.RunResult:
    config = load_config([], settings=settings)
    envs = {"numbers": TASKS} if "numbers" in config.config.envs else {}
    return asyncio.run(RLTrainer(config, envs=envs, directory=directory, resume=resume).train())


def read_lines(result: rlkit.RunResult) -> dict[int, dict[str, float]]:
    return dict(read_metrics(result.directory / "metrics.jsonl"))


def turns_of(directory: Path, step: int, env: str) -> list[Turn]:
    groups = [record.group for record in read_groups(table_path(directory, step)) if record.group.env == env]
    return [turn for group in groups for episode in group.episodes for turn in episode.turns]


def test_the_loss_of_conversations_is_that_of_transformers(byte_model_dir: Path, talks: Path) -> None:
    result = train(make_settings(byte_model_dir, source={"files": str(talks)}, steps=1))
    tokenizer, total, count = load_tokenizer(byte_model_dir), 0.0, 0
    for word, digits in TALKS:
        messages = [{"role": "user", "content": word}]
        prompt: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        reply = [*tokenizer.encode(digits, add_special_tokens=False), tokenizer.eos_token_id]
        total -= score(byte_model_dir, [*prompt, *reply])[-len(reply) :].sum()
        count += len(reply)
    assert result.metrics["service/loss:sum"] == pytest.approx(total, rel=1e-5)
    assert result.metrics["optim/nll"] == pytest.approx(total / count, rel=1e-5)
    assert result.metrics["optim/tokens"] == count == 9
    assert result.metrics["usage/sampled_tokens"] == result.metrics["batch/sampled_tokens"] == 0
    assert not any("reward" in name or "kl_sample" in name for name in result.metrics)
    assert_trained_exactly_once(result.directory)


def test_a_run_of_conversations_learns_them(byte_model_dir: Path, talks: Path) -> None:
    evaluation = {"envs": {"numbers": {"env": f"{__name__}:TASKS"}}, "every": 0}
    result = train(make_settings(byte_model_dir, source={"files": [str(talks)]}, epochs=20, eval=evaluation))
    lines = read_lines(result)
    assert sorted(lines) == list(range(21))  # four conversations in steps of four
    assert lines[20]["optim/nll"] < 0.2 * lines[1]["optim/nll"]
    assert lines[20]["eval/numbers/reward/mean"] > lines[0]["eval/numbers/reward/mean"]
    assert result.checkpoint is not None


def test_the_loss_is_chosen_by_the_source(byte_model_dir: Path, talks: Path) -> None:
    given = load_config([], settings=make_settings(byte_model_dir, source={"files": str(talks)})).config
    named = {"loss": {"name": "cross_entropy"}, "source": {"files": str(talks)}}
    assert given.loss == load_config([], settings=make_settings(byte_model_dir, **named)).config.loss
    assert given.loss.name == "cross_entropy"
    assert given.envs["source"].group_size == 1


def test_a_warm_start_comes_before_reinforcement(byte_model_dir: Path, talks: Path) -> None:
    settings = make_settings(
        byte_model_dir,
        envs={"numbers": {}},
        warm_start={"files": str(talks), "steps": 3, "learning_rate": 2e-2},
        steps=3,
        optimizer={"learning_rate": 1e-3, "schedule": "linear"},
    )
    result = train(settings)
    lines = read_lines(result)
    assert sorted(lines) == [1, 2, 3, 4, 5, 6]
    rates = [lines[step]["optim/learning_rate"] for step in range(1, 7)]
    assert rates == pytest.approx([2e-2, 2e-2 * 2 / 3, 2e-2 / 3, 1e-3, 1e-3 * 2 / 3, 1e-3 / 3])  # the schedule anew
    for step in (1, 2, 3):
        assert {record.group.env for record in read_groups(table_path(result.directory, step))} == {"warm_start"}
        assert "optim/nll" in lines[step]
        assert "env/all/reward/mean" not in lines[step]
        assert lines[step]["batch/staleness/max"] == 0
        assert {turn.version for turn in turns_of(result.directory, step, "warm_start")} == {step - 1}
    for step in (4, 5, 6):
        assert {record.group.env for record in read_groups(table_path(result.directory, step))} == {"numbers"}
        assert "optim/nll" not in lines[step]
        assert abs(lines[step]["optim/kl_sample_train_v1"]) < 1e-3  # sampled from the weights that they train
        assert "env/all/reward/mean" in lines[step]
    assert_trained_exactly_once(result.directory)


def test_the_pilot_of_a_run_with_a_warm_start_is_measured(byte_model_dir: Path, talks: Path) -> None:
    settings = make_settings(
        byte_model_dir, envs={"numbers": {}}, warm_start={"files": str(talks), "steps": 2}, steps=2
    )
    rehearsal = asyncio.run(rehearse(load_config([], settings=settings), envs={"numbers": TASKS}, pilot=1))
    assert {part.name: part.status for part in rehearsal.parts}["service"] == "ok"


@pytest.mark.slow
def test_an_interrupted_warm_start_goes_on_as_if_it_had_not_been(
    byte_model_dir: Path, talks: Path, tmp_path: Path
) -> None:
    settings = make_settings(
        byte_model_dir, envs={"numbers": {}}, warm_start={"files": str(talks), "steps": 2}, steps=3, seed=5
    )
    whole = train(settings)
    for cut in (1, 2, 3):
        directory = tmp_path / f"cut{cut}"
        stop = rlkit.StopSignal()

        class Stopping(rlkit.Tracker):
            def on_step(self, step: int, metrics: Mapping[str, float], *, cut: int = cut) -> None:
                if step == cut:
                    stop.request()  # noqa: B023  called within the same pass

        config = load_config([], settings=settings)
        trainer = RLTrainer(config, envs={"numbers": TASKS}, directory=directory, stop=stop, trackers=[Stopping()])
        first = asyncio.run(trainer.train())
        assert first.steps < 5  # a step that has begun is finished
        again = train(settings, directory=directory, resume=True)
        assert again.steps == 5
        for step in range(1, 6):
            assert read_lines(again)[step].get("service/loss:sum") == pytest.approx(
                read_lines(whole)[step].get("service/loss:sum"), rel=1e-6
            )
        assert_trained_exactly_once(directory)


def test_the_best_episodes_of_a_run_are_trained_on_token_for_token(byte_model_dir: Path, tmp_path: Path) -> None:
    first = train(make_settings(byte_model_dir, envs={"numbers": {}}, steps=3), directory=tmp_path / "first")
    episodes = [
        (record.group.draw, episode.member, episode)
        for step in (1, 2, 3)
        for record in read_groups(table_path(first.directory, step))
        for episode in record.group.episodes
    ]
    rewards = sorted({episode.reward for _, _, episode in episodes if episode.reward is not None})
    best = [entry for entry in episodes if (entry[2].reward or 0) >= rewards[-1]]
    source = {"run": str(first.directory), "reward": f">= {rewards[-1]:.10f}"}
    result = train(make_settings(byte_model_dir, source=source, epochs=1, batch={"groups": 1}))
    groups = [
        record.group
        for step in range(1, result.steps + 1)
        for record in read_groups(table_path(result.directory, step))
    ]
    assert sorted(group.task for group in groups) == sorted(f"first/{draw}/{member}" for draw, member, _ in best)
    originals = {f"first/{draw}/{member}": episode for draw, member, episode in best}
    for group in groups:
        (turn,), (original,) = group.episodes[0].turns, originals[group.task].turns
        assert turn.completion.tolist() == original.completion.tolist()
        assert turn.prompt.tokens.tolist() == original.prompt.tokens.tolist()
        assert turn.messages == original.messages
        assert group.episodes[0].reward == rewards[-1]
    update = read_update(update_path(result.directory, 1))
    assert all(np.all(each.advantages == 1) for record in update.values() for each in record.sequences)
    newest = {**source, "reward": None, "newest": 5}
    last = train(make_settings(byte_model_dir, source=newest, epochs=1, batch={"groups": 5}))
    tasks = {record.group.task for record in read_groups(table_path(last.directory, 1))}
    assert tasks == {f"first/{draw}/{member}" for draw, member, _ in episodes[-5:]}


def test_shaping_of_advantages_leaves_conversations_alone(byte_model_dir: Path, talks: Path) -> None:
    envs = {"numbers": {}, "demonstrations": {"args": {"files": str(talks)}, "group_size": 1, "weight": 1}}
    shaping = {"batch": {"clip_advantages": 0.5}, "length_penalty": {"coefficient": 1.0}}
    config = load_config([], settings={**make_settings(byte_model_dir, envs=envs), **shaping}).config
    preparation = make_preparation(config, {}, PPO(), references={})
    assert preparation.clip == {"numbers": 0.5}
    assert set(preparation.length_penalty) == {"numbers"}


def test_conversations_and_rollouts_share_the_steps_of_a_run(byte_model_dir: Path, talks: Path) -> None:
    envs = {"numbers": {}, "demonstrations": {"args": {"files": str(talks)}, "group_size": 1, "weight": 1}}
    settings = make_settings(byte_model_dir, envs=envs, steps=4, batch={"groups": 8, "group_size": 4})
    result = train({**settings, "schedule": {"mode": "async", "staleness": "strict"}})
    lines = read_lines(result)
    for step in (1, 2, 3, 4):
        ages = [step - 1 - turn.version for turn in turns_of(result.directory, step, "numbers")]
        assert lines[step]["batch/staleness/mean"] == pytest.approx(np.mean(ages))
        assert lines[step]["batch/staleness/max"] == max(ages)
        assert lines[step]["optim/nll"] > 0
        assert lines[step]["env/all/groups"] == lines[step]["env/numbers/groups"] < 8
        sampled = sum(len(turn.completion) for turn in turns_of(result.directory, step, "numbers"))
        assert lines[step]["batch/sampled_tokens"] == sampled < lines[step]["optim/tokens"]
    assert_trained_exactly_once(result.directory)


def test_an_environment_of_its_own_may_demonstrate(byte_model_dir: Path, tmp_path: Path) -> None:
    class Teaching(rlkit.Env):
        async def rollout(self, policy: rlkit.Policy) -> float:
            policy.demonstrate([{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}])
            return 0.0

    settings = make_settings(byte_model_dir, envs={"demonstrations": {}}, steps=1, batch={"groups": 2})
    config = load_config([], settings=settings)
    result = asyncio.run(RLTrainer(config, envs={"demonstrations": [Teaching()]}).train())
    assert result.metrics["optim/nll"] > 0


def test_readers_of_a_run_tell_demonstrations_from_samples(byte_model_dir: Path, talks: Path, tmp_path: Path) -> None:
    envs = {"numbers": {}, "demonstrations": {"args": {"files": str(talks)}, "group_size": 1, "weight": 1}}
    settings = make_settings(byte_model_dir, envs=envs, steps=1, batch={"groups": 8, "group_size": 4})
    run = train(settings, directory=tmp_path / "run").directory
    given, sampled = turns_of(run, 1, "demonstrations"), turns_of(run, 1, "numbers")
    assert given
    assert all(np.isnan(turn.logprobs).all() for turn in given)
    assert all(np.isfinite(turn.logprobs).all() for turn in sampled)
    for position, record in enumerate(read_groups(table_path(run, 1))):
        (turn,) = RunReader(run).read_episode(("step", 1), (position, 0, 0))["turns"]
        assert turn["demonstration"] == (record.group.env == "demonstrations")
        assert all((number is None) == turn["demonstration"] for number in turn["logprobs"])
        json.dumps(turn, allow_nan=False)
    export_episodes(str(run), tmp_path / "export")
    logs = [json.loads(path.read_text()) for path in (tmp_path / "export" / "logs").iterdir()]
    assert {log["eval"]["task"] for log in logs} == {"numbers", "demonstrations"}
    for log in logs:
        is_given, replies = log["eval"]["task"] == "demonstrations", [s["messages"][-1] for s in log["samples"]]
        assert {(r["source"], "model" in r) for r in replies} == {("input", False) if is_given else ("generate", True)}
        (usage,) = log["samples"][0]["model_usage"].values()
        assert (usage["output_tokens"] == 0) == is_given
    assert_trained_exactly_once(run)


def test_conversations_whose_prompts_fill_the_limit_of_a_sequence_are_refused(
    byte_model_dir: Path, talks: Path
) -> None:
    settings = make_settings(byte_model_dir, source={"files": str(talks)}, steps=1)
    problem = r"its prompt of \d+ tokens leaves nothing of batch.max_tokens = 4"
    with pytest.raises(UsageError, match=f"source: 4 of 4 conversations cannot be trained on; .*{problem}"):
        train({**settings, "batch": {"groups": 4, "max_tokens": 4}})


def test_a_step_whose_prompts_fill_the_limit_of_a_sequence_says_so(byte_model_dir: Path) -> None:
    notes = list[str]()

    class Ears(rlkit.Tracker):
        def on_note(self, message: str) -> None:
            notes.append(message)

    settings = make_settings(byte_model_dir, envs={"numbers": {}}, steps=1)
    config = load_config([], settings={**settings, "batch": {"groups": 4, "group_size": 4, "max_tokens": 4}})
    result = asyncio.run(RLTrainer(config, envs={"numbers": TASKS}, trackers=[Ears()]).train())
    assert result.metrics["optim/skipped"] == 1
    reason = "its sequences exceed batch.max_tokens before a token to train on (raise it)"
    assert f"step 1: {reason}, so there is nothing to learn; optim/skipped marks such steps" in notes


def test_thinking_that_the_chat_format_drops_is_noted_once(byte_model_dir: Path, talks: Path) -> None:
    notes = list[str]()

    class Ears(rlkit.Tracker):
        def on_note(self, message: str) -> None:
            notes.append(message)

    lines = [json.loads(line) for line in talks.read_text().splitlines()]
    lines[0]["messages"][-1]["thinking"] = "It is a number."
    talks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load_config([], settings=make_settings(byte_model_dir, source={"files": str(talks)}, steps=2))
    asyncio.run(RLTrainer(config, trackers=[Ears()]).train())
    told = [note for note in notes if "thinking" in note]
    assert told == [
        "source: the chat format drops the thinking of 1 of 4 conversations; another chat.renderer may keep it"
    ]


def test_a_file_that_has_changed_is_not_resumed_with(byte_model_dir: Path, talks: Path, tmp_path: Path) -> None:
    settings = make_settings(byte_model_dir, source={"files": str(talks)})
    train({**settings, "steps": 1}, directory=tmp_path / "run")
    talks.write_text(talks.read_text().replace("six", "seven"))
    with pytest.raises(ConfigError, match=r"talks\.jsonl has changed since the run began: put it back"):
        train({**settings, "steps": 2}, directory=tmp_path / "run", resume=True)


def test_a_file_that_is_listed_twice_is_refused(byte_model_dir: Path, talks: Path) -> None:
    with pytest.raises(ConfigError, match=r"talks\.jsonl: a file is listed twice; remove one$"):
        train(make_settings(byte_model_dir, source={"files": [str(talks), str(talks)]}, steps=1))


def test_the_kind_of_a_source_does_not_change_on_resumption(byte_model_dir: Path, talks: Path, tmp_path: Path) -> None:
    train(make_settings(byte_model_dir, envs={"numbers": {}}, steps=1), directory=tmp_path / "played")
    kinds = {"files": str(talks)}, {"run": str(tmp_path / "played")}
    for number, (first, second) in enumerate((kinds, kinds[::-1])):
        directory = tmp_path / f"run{number}"
        train(make_settings(byte_model_dir, source=first, steps=1), directory=directory)
        problem = f"source: {next(iter(second))}: the run began with conversations of `{next(iter(first))}`: set"
        with pytest.raises(ConfigError, match=problem) as error:
            train(make_settings(byte_model_dir, source=second, steps=2), directory=directory, resume=True)
        assert "\n" not in str(error.value)


def test_the_length_of_a_warm_start_does_not_change_on_resumption(
    byte_model_dir: Path, talks: Path, tmp_path: Path
) -> None:
    warm = {"files": str(talks), "steps": 2}
    settings = make_settings(byte_model_dir, envs={"numbers": {}}, steps=1)
    train({**settings, "warm_start": warm}, directory=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"warm_start\.steps: the run began with 2, and cannot go on with another"):
        train({**settings, "warm_start": {**warm, "steps": 3}}, directory=tmp_path / "run", resume=True)


def test_the_conversations_of_a_run_are_not_its_episodes(byte_model_dir: Path, talks: Path, tmp_path: Path) -> None:
    warm = {"files": str(talks), "steps": 1}
    settings = make_settings(byte_model_dir, envs={"numbers": {}}, warm_start=warm, steps=1)
    train(settings, directory=tmp_path / "first")
    source = {"run": str(tmp_path / "first")}
    result = train(make_settings(byte_model_dir, source=source, epochs=1, batch={"groups": 16}))
    assert result.metrics["batch/groups"] == 16  # the rollouts of its second step alone
    assert result.steps == 1


FAULTS = [
    ({"source": {}}, "source: set either files or run"),
    ({"source": {"files": "TALKS", "run": "x"}}, "source: set either files or run"),
    ({"source": {"files": "TALKS", "newest": 3}}, "source: newest has no effect: set run instead of files"),
    ({"source": {"run": "x", "roles": ["user"]}}, "source: roles has no effect: the episodes of a run have"),
    ({"source": {"run": "x", "reward": "high"}}, r"source\.reward: 'high' is not a condition such as '>= 1'"),
    ({"source": {"files": "TALKS", "roles": ["robot"]}}, r"^[^\n]*source\.roles\.0: expected[^\n]*found 'robot'$"),
    ({"source": {"files": "TALKS", "roles": []}}, r"source\.roles: must not be empty: add at least one entry"),
    (
        {"source": {"files": "TALKS"}, "loss": {"name": "ppo"}},
        "loss: ppo needs rollouts, and there are none; set it to",
    ),
    ({"envs": {"numbers": {}}, "loss": {"name": "cross_entropy"}}, "loss: cross_entropy is for the conversations of"),
    ({"warm_start": {"files": "TALKS"}}, "envs: name the environments to train on.*rename warm_start to source"),
    ({}, "envs: name the environments to train on"),
    ({"envs": {"warm_start": {}}}, r"envs\.warm_start: this name is reserved"),
    ({"source": {"files": "TALKS"}, "advantage": "maxrl"}, "advantage: has no effect, because there are no rollouts"),
    ({"source": {"files": "TALKS"}, "batch": {"group_size": 4}}, r"batch\.group_size: has no effect"),
    ({"source": {"files": "TALKS"}, "batch": {"clip_advantages": 1}}, r"batch\.clip_advantages: has no effect"),
    (
        {"source": {"files": "TALKS"}, "batch": {"replace_uninformative": True}},
        r"batch\.replace_uninformative: has no effect, because there are no rollouts",
    ),
    (
        {"envs": {"numbers": {}}, "eval": {"envs": {"demonstrations": {"args": {"files": "TALKS"}}}}},
        r"eval\.envs\.demonstrations: the model does not play given conversations",
    ),
    *(
        (
            {"envs": {"numbers": {}, "demonstrations": {"args": {"files": "TALKS"}, key: value}}},
            rf"envs\.demonstrations\.{key}: has no effect, because a conversation is one given episode",
        )
        for key, value in (("group_size", 2), ("temperature", 0.5), ("advantage", "grpo"), ("teacher", {"weight": 2}))
    ),
]


NEVER = [
    ("source", "env/source/reward/mean"),
    ("source", "env/all/solved"),
    ("source", "env/all/pass_at_4"),
    ("source", "optim/entropy"),
    ("source", "optim/ratio/effective"),
    ("source", "teacher/v1"),
    ("warm_start", "env/warm_start/reward/mean"),
]


@pytest.mark.parametrize(("section", "metric"), NEVER)
def test_a_metric_that_conversations_never_have_selects_no_weights(section: str, metric: str, talks: Path) -> None:
    settings: dict[str, object] = {section: {"files": str(talks)}, "best": {"metric": metric}}
    envs = {"numbers": {}} if section == "warm_start" else {}
    fix = "it needs rollouts; choose optim/nll, or a metric of eval.envs"
    with pytest.raises(ConfigError, match=f"best.metric: no step has a '{metric}': {fix}"):
        load_config([], settings={**settings, "envs": envs})
    for usual in ("optim/nll", "env/all/tokens/mean", "service/loss:sum"):
        load_config([], settings={**settings, "envs": envs, "best": {"metric": usual}})


@pytest.mark.parametrize(("settings", "problem"), FAULTS, ids=lambda value: str(value)[:40])
def test_a_contradiction_names_its_field(settings: dict[str, Any], problem: str, talks: Path) -> None:
    text = json.dumps(settings).replace("TALKS", str(talks))
    with pytest.raises(ConfigError, match=problem):
        load_config([], settings=json.loads(text))


LINES = [
    (b"\n", "talks.jsonl: there is no conversation; a line holds one"),
    (b"null", "line 1: a line must hold one conversation, in JSON"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "line 1: no message has a role in assistant and a weight ab"),
    (b"[1]", "line 1: a line must hold one conversation, in JSON"),
    (b"role,content", "line 1: a line must hold one conversation, in JSON"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weigth": 0}]}',
     "line 1: messages: unknown field 'weigth'. Did you mean 'weight'"),
    (b'{"messages": [{"role": "assistant", "content": "x"}], "id": 3, "tool": []}',
     "line 1: unknown field 'tool'. Did you mean 'tools'"),
    (b'{"messages": [{"role": "assistant", "content": "x", "trainable": false}]}',
     "line 1: messages: unknown field 'trainable'. Leave it out."),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": true}]}', "line 1: a message has the weight True"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": -1}]}', "line 1: a message has the weight -1"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": "1"}]}', "line 1: a message has the weight '1'"),
    (b'{"messages": [{"role": "assistant", "content": "x", "weight": NaN}]}', "line 1: a message has the weight nan"),
    (b"\n{", "line 2: "),
    (b'{"text": "x"}', "line 1: messages: Field required"),
    (b'{"messages": [{"role": "robot", "content": "x"}]}', r"line 1: messages\.0\.role: "),
    (b'{"messages": [{"role": "assistant", "content": "\xff"}]}', "line 1: "),
    (b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "x"}}]}]}',
     "line 1: the arguments of the tool call '1' are not a JSON object"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "problem"), LINES)
def test_a_file_that_cannot_be_read_names_the_line(
    content: bytes, problem: str, talks: Path, byte_model_dir: Path
) -> None:
    talks.write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        train(make_settings(byte_model_dir, source={"files": str(talks)}, steps=1))


def test_a_file_or_run_that_does_not_exist_is_named(byte_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"source: .*nothing\.jsonl cannot be read: No such file"):
        train(make_settings(byte_model_dir, source={"files": str(tmp_path / "nothing.jsonl")}, steps=1))
    with pytest.raises(ConfigError, match="source: there is no run 'nothing'"):
        train(make_settings(byte_model_dir, source={"run": "nothing"}, steps=1))


def test_tools_of_conversations_may_be_in_the_shape_of_an_environment(tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}}
    tool = {"name": "price", "description": "The price.", "parameters": parameters}
    call = {"id": "1", "name": "price", "arguments": {"item": "pear"}}
    vendors_call = {
        "id": "1",
        "type": "function",
        "function": {"name": "price", "arguments": json.dumps(call["arguments"])},
    }
    lines = [
        {
            "messages": [
                {"role": "assistant", "content": "", "tool_calls": [asked]},
                {"role": "tool", "tool_call_id": "1", "content": "42"},
            ],
            "tools": [offered],
        }
        for asked, offered in ((call, tool), (vendors_call, {"type": "function", "function": tool}))
    ]
    path = tmp_path / "shop.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = demonstrations(pin=lambda current: current, files=str(path))
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert first.messages == second.messages
    assert first.messages[0]["tool_calls"] == [call]
    assert first.tools == second.tools == [tool]


def test_weights_and_roles_choose_what_is_trained(byte_model_dir: Path, talks: Path) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm", "weight": 0.25},
    ]
    talks.write_text(json.dumps({"messages": messages, "tools": None}))
    result = train(make_settings(byte_model_dir, source={"files": str(talks)}, steps=1, batch={"groups": 1}))
    tokenizer = load_tokenizer(byte_model_dir)
    (turn,) = turns_of(result.directory, 1, "source")
    assert "no" in tokenizer.decode(turn.prompt.tokens)
    assert "yes" in tokenizer.decode(turn.completion)
    assert turn.messages[-1].get("thinking") == "hm"
    ((sequence,),) = [group.sequences for group in read_update(update_path(result.directory, 1)).values()]
    assert set(sequence.advantages.tolist()) == {0.25}
    source = {"files": str(talks), "roles": ["user"]}
    result = train(make_settings(byte_model_dir, source=source, steps=1, batch={"groups": 1}))
    texts = [tokenizer.decode(turn.completion) for turn in turns_of(result.directory, 1, "source")]
    assert [text.count("one") + text.count("two") for text in texts] == [1, 1]


@pytest.mark.slow
def test_a_run_of_another_tokenizer_is_refused(byte_model_dir: Path, tmp_path: Path) -> None:
    first = train(make_settings(byte_model_dir, envs={"numbers": {}}, steps=1), directory=tmp_path / "first")
    other = tiny_model(tmp_path / "other")
    with pytest.raises(UsageError, match=r"source\.run: the tokenizer of .* is not that of"):
        train(make_settings(other, source={"run": str(first.directory)}, steps=1))


def test_conversations_that_do_not_fit_are_named_before_the_first_step(byte_model_dir: Path, talks: Path) -> None:
    talks.write_text(
        json.dumps({"messages": [{"role": "user", "content": "x" * 9000}, {"role": "assistant", "content": "1"}]})
    )
    problem = (
        "source: 1 of 1 conversations cannot be trained on; .* The first is talks/1: a conversation of .* tokens does"
    )
    with pytest.raises(UsageError, match=problem):
        train(make_settings(byte_model_dir, source={"files": str(talks)}, steps=1))


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "one"}]])
def test_a_demonstration_without_a_token_to_train_on_is_refused(
    byte_model_dir: Path, messages: list[rlkit.Message]
) -> None:
    class Silent(rlkit.Env):
        async def rollout(self, policy: rlkit.Policy) -> float:
            policy.demonstrate(messages)
            return 1.0

    settings = make_settings(byte_model_dir, envs={"demonstrations": {}}, steps=1, batch={"groups": 1})
    config = load_config([], settings=settings)
    problem = r"envs\.demonstrations: 1 of 1 conversations cannot be .* it has no token to train on"
    with pytest.raises(UsageError, match=problem):
        asyncio.run(RLTrainer(config, envs={"demonstrations": [Silent()]}).train())


class Parrot(rlkit.Policy):
    async def _respond(self, request: object) -> rlkit.Reply:
        raise NotImplementedError


def test_a_policy_that_only_samples_refuses_demonstrations() -> None:
    policy = Parrot(sampling=Sampling(4), limits=Limits())
    with pytest.raises(EnvironmentFault, match="this policy only samples"):
        policy.demonstrate([{"role": "assistant", "content": "1"}])
    with pytest.raises(EnvironmentFault, match="this policy only samples"):
        policy.replay([])


def test_a_check_of_conversations_alone_names_the_dry_run(talks: Path) -> None:
    with pytest.raises(UsageError, match="conversations play nothing to look at; try them by rlkit train FILE --dry"):
        load_target("demonstrations", [f"files={talks}"])


def test_an_evaluation_of_conversations_alone_names_the_field(byte_model_dir: Path, talks: Path) -> None:
    config = load_config([], settings=make_settings(byte_model_dir, source={"files": str(talks)}))
    with pytest.raises(ConfigError, match=r"eval\.envs: there is no environment to evaluate"):
        asyncio.run(rlkit.evaluate(config))


def test_the_call_from_python_trains_on_conversations(
    byte_model_dir: Path, talks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    result = rlkit.train(
        model=str(byte_model_dir), source={"files": str(talks)}, steps=1, service={"engine_threads": 1}
    )
    assert result.metrics["optim/nll"] > 0


def test_a_record_of_the_configuration_keeps_the_variables_of_a_source(talks: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("source: {files: '${TALKS}'}\n")
    resolved = load_config([file], environ={"TALKS": str(talks)})
    assert resolved.config.envs["source"].args == {"files": [str(talks)]}
    text = "\n".join(show_lines(resolved))
    assert "${TALKS}" in text
    assert str(talks) not in text
    (tmp_path / "config.yaml").write_text(text)
    again = load_config([tmp_path / "config.yaml"], environ={"TALKS": str(talks)}).config
    assert again == resolved.config
