"""Teachers, through the real Tinker SDK, on the embedded engine with small real models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model import transformer
from rlkit.engine.model.attention import lay_out
from rlkit.engine.model.lora import LoraSettings, make_adapter
from rlkit.engine.model.model_files import load_tokenizer
from rlkit.engine.model.transformer import compute_hidden
from rlkit.engine.model.weights import load_weights
from rlkit.engine.training.learner import Learner
from rlkit.engine.training.losses import make_loss
from rlkit.engine.training.packing import Example
from rlkit.errors import ConfigError, RlkitError, UsageError
from rlkit.serving.references import load_context
from rlkit.store.history import read_groups, read_metrics, table_path
from rlkit.testing import ByteChat, byte_model, tiny_model
from rlkit.token_records.updates import read_update, update_path
from rlkit.tools.audit import audit
from rlkit.training.trainer import RLTrainer
from tests.engine.helpers import as_double
from tests.engine.test_learner import double_adapter, formula_of_project
from tests.limits import HANG_S

TOKENS = 6


@dataclass(frozen=True)
class Talk(rlkit.SingleTurnEnv):
    """Say anything: every reply has the same reward."""

    start: str

    def prompt(self) -> list[rlkit.Message]:
        return [{"role": "user", "content": self.start}]

    def grade(self, reply: rlkit.Reply) -> float:
        return 1.0


TASKS = [Talk(text) for text in ("one", "two", "six", "ten")]


def speak_loudly(messages: list[rlkit.Message]) -> list[rlkit.Message]:
    return [{"role": "system", "content": "SHOUT!"}, *messages]


def return_text(messages: list[rlkit.Message]) -> object:
    return "no list"


def return_no_messages(messages: list[rlkit.Message]) -> object:
    return [{"role": "user", "content": None}]


def change_in_place(messages: list[rlkit.Message]) -> list[rlkit.Message]:
    messages[0]["content"] = f"{messages[0]['content']} Quickly."
    return messages


def exit_at_once(messages: list[rlkit.Message]) -> list[rlkit.Message]:
    raise SystemExit(3)


def make_trainer(
    model: Path,
    *,
    directory: Path | None = None,
    resume: bool = False,
    trackers: Sequence[rlkit.Tracker] = (),
    **more: object,
) -> RLTrainer:
    settings: Mapping[str, object] = {
        "model": str(model),
        "envs": {"talk": {}},
        "eval": {"envs": {"talk": {"env": f"{__name__}:TASKS", "temperature": 1.0, "attempts": 16}}, "every": 5},
        "reward": "none",
        "batch": {"groups": 4, "group_size": 16},
        "sampling": {"max_tokens": TOKENS, "stop": ["\x00"]},
        "optimizer": {"learning_rate": 1e-2},
        "lora": {"rank": 16, "train_unembed": True},
        "service": {"engine_threads": 1},
        **more,
    }
    resolved = load_config([], settings=settings)
    return RLTrainer(resolved, envs={"talk": TASKS}, trackers=trackers, directory=directory, resume=resume)


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same kind with other weights."""
    return byte_model(tmp_path_factory.mktemp("models") / "teacher", seed=7)


def assert_trained_exactly_once(run: Path) -> None:
    for report in asyncio.run(audit(run)).values():
        assert report.mismatch is None
        assert report.tokens > 0


@cache
def load_network(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)


def score_all(model: Path, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of transformers, [P - 1, V] float64, in the place of each token but the first."""
    network = load_network(model)
    with torch.no_grad():
        return network(torch.tensor([tokens])).logits[0].log_softmax(-1)[:-1]


def score(model: Path, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of transformers, [P - 1] float64, of each token but the first."""
    return score_all(model, tokens).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_the_advantage_is_the_log_ratio_of_both_models(byte_model_dir: Path, teacher_dir: Path) -> None:
    result = asyncio.run(make_trainer(byte_model_dir, steps=1, teacher={"model": str(teacher_dir)}, eval=None).train())
    update = read_update(update_path(result.directory, 1))
    checked = 0
    for record in read_groups(table_path(result.directory, 1)):
        for sequence in update[record.group.draw].sequences:
            (turn,) = record.group.episodes[sequence.member].turns
            tokens = [*turn.prompt.tokens.tolist(), *turn.completion.tolist()]
            ratio = score(byte_model_dir, tokens) - score(teacher_dir, tokens)
            np.testing.assert_allclose(sequence.advantages, -ratio[-len(turn.completion) :], atol=2e-4)
            checked += len(turn.completion)
    assert checked == result.metrics["optim/tokens"] > 4 * 15 * TOKENS
    assert result.metrics["teacher/v1"] > 0.1
    assert result.metrics["env/talk/teacher/kl"] == result.metrics["teacher/v1"]
    quarters = [result.metrics[f"teacher/quarter/{number}"] for number in (1, 2, 3, 4)]
    assert min(quarters) < result.metrics["teacher/v1"] < max(quarters)
    assert_trained_exactly_once(result.directory)


def test_the_gradient_is_that_of_float64(
    byte_model_dir: Path, teacher_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = asyncio.run(make_trainer(byte_model_dir, steps=1, teacher={"model": str(teacher_dir)}, eval=None).train())
    update, examples = read_update(update_path(result.directory, 1)), list[Example]()
    weights = load_weights(byte_model_dir)
    adapter = make_adapter(weights.config, LoraSettings(16, train_unembed=True), seed=0)
    exact, trainable = as_double(weights), double_adapter(adapter)
    monkeypatch.setattr(transformer, "project", formula_of_project)
    total = torch.zeros((), dtype=torch.float64)
    for record in read_groups(table_path(result.directory, 1))[:2]:
        for sequence in update[record.group.draw].sequences:
            (turn,) = record.group.episodes[sequence.member].turns
            tokens = np.array([*turn.prompt.tokens.tolist(), *turn.completion.tolist()])
            advantages, logprobs = np.zeros((2, len(tokens) - 1), np.float32)
            advantages[sequence.mask], logprobs[sequence.mask] = sequence.advantages, turn.logprobs
            inputs = {"advantages": advantages, "logprobs": logprobs}
            examples.append(Example(tokens[:-1].astype(np.int64), tokens[1:].astype(np.int64), inputs))
            # Σ (log p_teacher − log p) · ∇ log p, with both models in float64
            hidden = compute_hidden(exact, torch.from_numpy(tokens[:-1]), lay_out([len(tokens) - 1]), adapter=trainable)
            unembed = trainable.unembed()
            assert unembed is not None
            logits = hidden @ exact.output + unembed.delta(hidden)
            places = torch.arange(len(tokens) - 1), torch.from_numpy(tokens[1:])
            mask = torch.tensor(sequence.mask)
            logp = logits.log_softmax(-1)[places][mask]
            taught = torch.from_numpy(score(teacher_dir, tokens.tolist()))[mask]
            total = total - ((taught - logp.detach()) * logp).sum()
    total.backward()
    expected = torch.cat([view.grad.flatten() for view in trainable.views.values() if view.grad is not None])
    monkeypatch.undo()
    lanes = Lanes(1)
    learner = Learner(weights, adapter, lanes)
    learner.run(examples, make_loss("importance_sampling", {}))
    lanes.close()
    assert float((learner.gradients.double().sum(0) - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("top", [3, 1024])
def test_the_likeliest_tokens_have_the_mean_of_their_advantages(
    byte_model_dir: Path, teacher_dir: Path, top: int
) -> None:
    teacher, loss = {"model": str(teacher_dir), "weight": 0.5}, {"name": "distillation", "top_tokens": top}
    result = asyncio.run(make_trainer(byte_model_dir, steps=1, teacher=teacher, loss=loss, eval=None).train())
    update, expected = read_update(update_path(result.directory, 1)), 0.0
    for record in read_groups(table_path(result.directory, 1)):
        for sequence in update[record.group.draw].sequences:
            (turn,) = record.group.episodes[sequence.member].turns
            tokens, count = [*turn.prompt.tokens.tolist(), *turn.completion.tolist()], len(turn.completion)
            taught, own = (score_all(model, tokens)[-count:] for model in (teacher_dir, byte_model_dir))
            sampled = torch.from_numpy(turn.completion.astype(np.int64))[:, None]
            ratio = (own - taught).gather(1, sampled)[:, 0]
            np.testing.assert_allclose(sequence.advantages, -0.5 * ratio, atol=2e-4)
            likeliest = taught.topk(min(top, taught.shape[1]), -1).indices
            means = (own.exp() * (own - taught)).gather(1, likeliest).sum(1)
            means /= own.exp().gather(1, likeliest).sum(1)
            expected += 0.5 * float(torch.where((likeliest == sampled).any(1), means, ratio).sum())
    assert result.metrics["service/loss:sum"] == pytest.approx(expected, rel=1e-3)
    assert abs(result.metrics["optim/kl_sample_train_v1"]) < 1e-4  # the first target is the sampled token
    assert_trained_exactly_once(result.directory)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["importance_sampling", "distillation"])
def test_a_student_approaches_its_teacher_without_rewards(byte_model_dir: Path, teacher_dir: Path, loss: str) -> None:
    teacher, batch = {"model": str(teacher_dir)}, {"groups": 4, "group_size": 64}
    trainer = make_trainer(byte_model_dir, steps=10, teacher=teacher, batch=batch, loss=loss)
    result = asyncio.run(trainer.train())
    lines = dict(read_metrics(result.directory / "metrics.jsonl"))
    kl = [lines[step]["eval/talk/teacher/kl"] for step in (0, 5, 10)]
    assert kl[0] > kl[1] > kl[2]
    assert kl[2] < 0.6 * kl[0]
    assert lines[10]["env/talk/reward/mean"] == 1.0


def test_a_teacher_with_a_prompt_of_its_own_scores_the_same_replies(byte_model_dir: Path) -> None:
    teacher = {"prompt": f"{__name__}:speak_loudly"}
    result = asyncio.run(make_trainer(byte_model_dir, steps=1, teacher=teacher).train())
    update = read_update(update_path(result.directory, 1))
    first = read_groups(table_path(result.directory, 1))[0].group
    (turn,) = first.episodes[0].turns
    messages = speak_loudly([{"role": "user", "content": TASKS[first.draw % len(TASKS)].start}])
    tokenizer = load_tokenizer(byte_model_dir)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    reply = turn.completion.tolist()
    ratio = score(byte_model_dir, [*turn.prompt.tokens.tolist(), *reply])[-len(reply) :]
    ratio = ratio - score(byte_model_dir, [*prompt, *reply])[-len(reply) :]
    (sequence,) = [each for each in update[first.draw].sequences if each.member == 0]
    np.testing.assert_allclose(sequence.advantages, -ratio, atol=2e-4)


def test_a_prompt_function_may_change_its_argument() -> None:
    make_context = load_context(f"{__name__}:change_in_place", ByteChat(), "teacher.prompt")
    messages: list[rlkit.Message] = [{"role": "user", "content": "Go."}]
    first, second = (make_context(messages).tokens.tolist() for _ in range(2))
    assert first == second
    assert messages == [{"role": "user", "content": "Go."}]


def test_groups_of_steps_ahead_have_the_teacher_that_begins_after_the_warm_start(
    byte_model_dir: Path, teacher_dir: Path, tmp_path: Path
) -> None:
    talks = tmp_path / "talks.jsonl"
    talks.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}')
    settings: Mapping[str, object] = {
        "warm_start": {"files": str(talks), "steps": 2, "learning_rate": 1e-4},
        "teacher": {"model": str(teacher_dir), "first_step": 3},
        "schedule": {"mode": "async"},
        "eval": None,
    }
    result = asyncio.run(make_trainer(byte_model_dir, steps=2, **settings).train())
    lines = [line for step, line in read_metrics(result.directory / "metrics.jsonl") if step]
    assert ["optim/sequences" in line for line in lines] == [True] * 4


def test_each_environment_may_have_its_own_teacher_for_some_steps(byte_model_dir: Path, teacher_dir: Path) -> None:
    teacher = {"model": str(teacher_dir), "first_step": 2, "last_step": 2}
    envs = {"talk": {}, "chat": {"env": f"{__name__}:TASKS", "teacher": teacher}}
    settings = {"envs": envs, "reward": "train", "eval": None, "batch": {"groups": 2, "group_size": 2}}
    result = asyncio.run(make_trainer(byte_model_dir, steps=3, **settings).train())
    lines = [line for _, line in read_metrics(result.directory / "metrics.jsonl")]
    assert ["env/chat/teacher/kl" in line for line in lines] == [False, True, False]
    assert not any("env/talk/teacher/kl" in line for line in lines)
    assert ["optim/sequences" in line for line in lines] == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["importance_sampling", "distillation"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    byte_model_dir: Path, teacher_dir: Path, tmp_path: Path, loss: str
) -> None:
    teacher = {"model": str(teacher_dir)}
    settings = {"steps": 6, "teacher": teacher, "loss": loss, "eval": None, "checkpoint": {"every": 2}}
    whole = asyncio.run(make_trainer(byte_model_dir, directory=tmp_path / "whole", **settings).train())
    trainer = make_trainer(byte_model_dir, directory=tmp_path / "cut", **settings)

    async def cut() -> None:
        task = asyncio.create_task(trainer.train())
        async with asyncio.timeout(HANG_S):
            while not (tmp_path / "cut" / "updates" / "000003.parquet").exists():
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(cut())
    resumed = asyncio.run(make_trainer(byte_model_dir, directory=tmp_path / "cut", resume=True, **settings).train())
    assert resumed.metrics["teacher/v1"] == whole.metrics["teacher/v1"]
    assert_trained_exactly_once(resumed.directory)


def test_several_teachers_of_an_environment_are_added(byte_model_dir: Path, teacher_dir: Path) -> None:
    teachers = {
        "strong": {"model": str(teacher_dir), "weight": 0.5},
        "loud": {"prompt": f"{__name__}:speak_loudly", "weight": 2.0},
    }
    result = asyncio.run(make_trainer(byte_model_dir, steps=1, teachers=teachers).train())
    update = read_update(update_path(result.directory, 1))
    tokenizer, checked = load_tokenizer(byte_model_dir), 0
    for record in read_groups(table_path(result.directory, 1)):
        messages = speak_loudly(list(record.group.episodes[0].turns[0].messages[:-1]))
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for sequence in update[record.group.draw].sequences[:4]:
            (turn,) = record.group.episodes[sequence.member].turns
            reply = turn.completion.tolist()
            tokens = [*turn.prompt.tokens.tolist(), *reply]
            own = score(byte_model_dir, tokens)[-len(reply) :]
            strong = own - score(teacher_dir, tokens)[-len(reply) :]
            loud = own - score(byte_model_dir, [*prompt, *reply])[-len(reply) :]
            np.testing.assert_allclose(sequence.advantages, -0.5 * strong - 2 * loud, atol=5e-4)
            checked += 1
    assert checked == 16
    line = result.metrics
    assert "KL to the teacher" in result.describe_gain()
    assert line["env/talk/teacher/kl"] == pytest.approx(
        (line["env/talk/teacher/strong/kl"] + line["env/talk/teacher/loud/kl"]) / 2
    )
    assert line["eval/talk/teacher/strong/kl"] > line["eval/talk/teacher/loud/kl"]
    assert_trained_exactly_once(result.directory)


BEGUN, ASKED = list[int](), list[int]()


def note_question(messages: list[rlkit.Message]) -> list[rlkit.Message]:
    ASKED.append(len(BEGUN))
    return messages


class Waiting(rlkit.Env):
    """Each second rollout ends after the teacher was asked about the first."""

    task_id = "waiting"

    async def rollout(self, policy: rlkit.Policy) -> float:
        BEGUN.append(len(BEGUN))
        is_second = len(BEGUN) == 2
        await policy.chat([{"role": "user", "content": "one"}])
        while is_second and not ASKED:
            await asyncio.sleep(0.01)
        return 1.0


def test_a_teacher_is_asked_as_soon_as_a_rollout_ends(byte_model_dir: Path) -> None:
    BEGUN.clear()
    ASKED.clear()
    settings = load_config(
        [],
        settings={
            "model": str(byte_model_dir),
            "teacher": {"prompt": f"{__name__}:note_question"},
            "reward": "none",
            "steps": 1,
            "batch": {"groups": 1, "group_size": 2},
            "sampling": {"max_tokens": TOKENS, "stop": ["\x00"]},
            "rollouts": {"timeout_s": HANG_S, "max_retries": 0, "coalesce": "never"},
        },
        envs=["waiting"],
    )
    result = asyncio.run(RLTrainer(settings, envs={"waiting": [Waiting()]}).train())
    assert result.metrics["env/waiting/failed"] == 0
    assert len(ASKED) == 2  # nothing is asked again when the group is complete


def test_a_teacher_with_another_tokenizer_is_refused(byte_model_dir: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "tiny")
    trainer = make_trainer(byte_model_dir, steps=1, teacher={"model": str(other)}, eval=None)
    with pytest.raises(UsageError, match=r"teacher\.model: the tokenizer of .*tiny is not that of .*: "):
        asyncio.run(trainer.train())


def test_a_missing_teacher_is_named(byte_model_dir: Path) -> None:
    path = "tinker://nobody:train:0/sampler_weights/none"
    with pytest.raises(UsageError, match=f"^teacher: .*{path}"):
        asyncio.run(make_trainer(byte_model_dir, steps=1, teacher={"checkpoint": path}, eval=None).train())
    teachers = {"big": {"model": "nobody/none"}}
    with pytest.raises(RlkitError, match=r"^teachers\.big\.model: the tokenizer of nobody/none is not on this machine"):
        asyncio.run(make_trainer(byte_model_dir, steps=1, teachers=teachers, eval=None).train())


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"prompt": f"{__name__}:return_text"}, "type str: it must return a non-empty list of messages"),
        ({"prompt": f"{__name__}:return_no_messages"}, "type list: it must return a non-empty list of messages"),
        ({"prompt": f"{__name__}:exit_at_once"}, "exit_at_once failed: SystemExit: 3"),
    ],
)
def test_a_prompt_function_that_is_wrong_ends_the_run(
    byte_model_dir: Path, teacher: Mapping[str, object], message: str
) -> None:
    with pytest.raises(RlkitError, match=message):
        asyncio.run(make_trainer(byte_model_dir, steps=1, teacher=teacher, eval=None).train())


@pytest.mark.parametrize(
    ("name", "problem"), [("TOKENS", "is not a function of messages"), ("nothing", "has no 'nothing'")]
)
def test_a_prompt_that_is_no_function_is_found_before_the_run(byte_model_dir: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^teacher\.prompt: .*{problem}"):
        make_trainer(byte_model_dir, teacher={"prompt": f"{__name__}:{name}"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "reward is none and there is no teacher"),
        ({"teacher": {"weight": 0}}, "teacher.weight"),
        ({"teacher": {"weight": 1e39}}, "teacher.weight"),
        ({"teacher": {"model": ""}}, "teacher.model"),
        ({"teacher": {"last_step": 2, "first_step": 3}}, "last_step: 2 is before first_step, 3"),
        ({"teacher": {"first_step": 9}, "steps": 8}, "teacher.first_step: 9 is after the last step, 8"),
        ({"teacher": {"first_step": 2}, "steps": 8}, "teacher: reward is none, so a teacher must count"),
        ({"teacher": {"last_step": 7}, "steps": 8}, "teacher: reward is none, so a teacher must count in each step"),
        (
            {"teachers": {"a": {"model": "x", "first_step": 3}, "b": {"model": "y", "last_step": 1}}, "steps": 3},
            r"teachers\.a: reward is none, so a teacher must count in each step",
        ),
        ({"teachers": {"a": {}, "b": {"weight": 2}}}, r"teachers\.a: it is the model that the run starts from"),
        ({"teachers": {"a": {"modle": "x"}}}, r"teachers\.a\.modle: unknown field"),
        (
            {"teachers": {"a": {"prompt": "x:y"}}, "envs": {"talk": {"teacher": {"prompt": "x:y"}}}},
            "teachers: has no effect, because every environment sets its own teachers or teacher",
        ),
        ({"envs": {"talk": {"teachers": {}}}}, "reward is none and there is no teacher"),
        (
            {"reward": "train", "best": {"metric": "eval/talk/teacher/kl"}},
            "no step has a 'eval/talk/teacher/kl': set teacher",
        ),
        (
            {"teachers": {"a": {"prompt": "x:y"}}, "best": {"metric": "env/talk/teacher/b/kl"}},
            "best.metric: no step has a 'env/talk/teacher/b/kl'; known: kl, a/kl",
        ),
        (
            {"envs": {"talk": {"teacher": {"first_step": 9}}}, "steps": 8},
            r"envs\.talk\.teacher\.first_step: 9 is after the last step, 8",
        ),
        (
            {"reward": "train", "teacher": {"last_step": 2}, "warm_start": {"files": "talks.jsonl", "steps": 2}},
            "teacher.last_step: 2 is within the warm start of 2 steps",
        ),
        ({"teacher": {"checkpoint": "runs/last"}}, "is not a path of the form tinker://"),
        ({"teacher": {"prompt": "x:y"}, "envs": {"talk": {"advantage": "grpo"}}}, "envs.talk.advantage: has no effect"),
        ({"teacher": {"prompt": "x:y"}, "advantage": "grpo"}, "advantage: has no effect, because reward is none"),
        ({"teacher": {"prompt": "x:y"}, "length_penalty": {"coefficient": 1.0}}, "length_penalty: has no effect"),
        ({"teacher": {"modle": "x"}}, "modle"),
        ({"loss": "distillation", "reward": "train"}, "loss: distillation needs a teacher"),
        ({"teacher": {"prompt": "x:y"}, "loss": {"name": "distillation", "top_tokens": 0}}, r"loss\.top_tokens"),
        (
            {"teachers": {"a": {"prompt": "x:y", "discount": 0.5}}, "loss": "distillation"},
            r"teachers\.a\.discount: has no effect with the loss distillation; leave it out",
        ),
    ],
)
def test_a_wrong_setting_is_named(byte_model_dir: Path, settings: Mapping[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_trainer(byte_model_dir, **settings)


def test_teachers_may_follow_each_other(byte_model_dir: Path) -> None:
    teachers = {"a": {"model": "x", "first_step": 2, "last_step": 5}, "b": {"model": "y", "last_step": 1}}
    make_trainer(byte_model_dir, teachers={**teachers, "c": {"model": "z", "first_step": 4}}, steps=8)
    make_trainer(byte_model_dir, teachers=teachers, steps=5)
    with pytest.raises(ConfigError, match="must count in each step"):
        make_trainer(byte_model_dir, teachers=teachers, steps=6)


def fill_context(messages: list[rlkit.Message]) -> list[rlkit.Message]:
    return [{"role": "system", "content": "x" * 5000}, *messages]


@pytest.mark.parametrize("loss", ["importance_sampling", "distillation"])
def test_a_prompt_that_fills_the_context_of_the_teacher_does_not_end_the_run(byte_model_dir: Path, loss: str) -> None:
    class Ears(rlkit.Tracker):
        def on_note(self, message: str) -> None:
            heard.append(message)

    heard = list[str]()
    teacher = {"prompt": f"{__name__}:fill_context"}
    settings: Mapping[str, object] = {"teacher": teacher, "eval": None, "steps": 2, "loss": loss}
    trainer = make_trainer(byte_model_dir, trackers=[Ears()], batch={"groups": 2, "group_size": 2}, **settings)
    assert asyncio.run(trainer.train()).status == "completed"
    beyond = "teacher: tokens beyond its context of 4,096 tokens have no term in the advantages"
    assert heard.count(beyond) == 1


def test_a_teacher_after_the_last_step_of_the_epochs_is_named(byte_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.first_step: 9 is after the last step, 1"):
        make_trainer(byte_model_dir, epochs=1, reward="train", teacher={"first_step": 9}, eval=None)
