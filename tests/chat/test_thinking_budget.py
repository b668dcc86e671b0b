"""A reply whose thinking has used up its tokens is ended, and the answer is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rlkit
from rlkit.algorithms.datums import episode_data
from rlkit.chat.format import ChatFormat
from rlkit.chat.renderers import chat_format
from rlkit.chat.thinking_budget import end_of_thinking
from rlkit.errors import ConfigError
from rlkit.metrics.metrics import group_metrics
from rlkit.policy import Limits
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.testing import ByteChat
from rlkit.testing.policies import ScriptedSampler
from rlkit.tokenizers.load import load_tokenizer
from rlkit.tools.audit import audit
from rlkit.types import BudgetForcing, Group, Message, Prompt, Reply, Sampling, Tokens
from tests.builders import episode

PHRASE = " ... enough."
ANALYSIS = "<|start|>assistant<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
ASKED: list[Message] = [{"role": "user", "content": "What is 6 * 7?"}]
FORCING = BudgetForcing(PHRASE, context_tokens=400, spare_tokens=10)


@pytest.mark.parametrize(
    ("text", "appended"),
    [
        (f"{ANALYSIS}I think", f"{PHRASE}<|end|>{FINAL}"),
        (f"{ANALYSIS}so<|end|>", FINAL),
        (f"{ANALYSIS}x<|end|>{FINAL}4", ""),
        (f"{FINAL}old<|return|><|start|>user<|message|>q<|end|>{ANALYSIS}I", f"{PHRASE}<|end|>{FINAL}"),
        (f"{ANALYSIS}x<|end|><|start|>", FINAL.removeprefix("<|start|>")),
        (f"{ANALYSIS}x<|end|><|start|>assistant", "<|channel|>final<|message|>"),
        (f"{ANALYSIS}x<|end|><|start|>assistant<|channel|>final", "<|message|>"),
        ("<|start|>assistant<|channel|>analysis", f"<|message|>{PHRASE}<|end|>{FINAL}"),
        ("<think>\nI think", f"{PHRASE}\n</think>\n\n"),
        ("<think>\nI think\n</think>\n\n4", ""),
        ("<think>\n\n</think>\n\nThe answer", ""),
        ("The answer", PHRASE),
    ],
)
def test_thinking_ends_with_the_words_of_the_model_family(text: str, appended: str) -> None:
    assert end_of_thinking(text, PHRASE) == appended


class Author:
    """Thinks for ever, and answers once the thinking was ended; keeps what it was asked with."""

    def __init__(self, thinking: str, *, end_text: str, answer: str) -> None:
        self.thinking, self.end_text, self.answer = thinking, end_text, answer
        self.seeds: list[int] = []

    def __call__(self, prompt: str, /, *, seed: int) -> str:
        self.seeds.append(seed)
        return self.answer if prompt.endswith(self.end_text) else self.thinking


def sample_reply(
    chat: ChatFormat, author: Callable[..., str], *, max_tokens: int = 40, forcing: BudgetForcing | None = FORCING
) -> tuple[Reply, RecordingPolicy, ScriptedSampler]:
    sampler = ScriptedSampler(author, chat=chat, version=3)  # pyright: ignore
    policy = RecordingPolicy(
        sampler=lambda: sampler,
        chat=chat,
        sampling=Sampling(max_tokens, forcing=forcing),
        seed=lambda turn: 100 + turn,
        limits=Limits(max_turns=1, context_tokens=1000),
    )
    return asyncio.run(policy.chat(ASKED)), policy, sampler


def test_answer_is_in_the_same_turn_and_forced_tokens_are_marked() -> None:
    author = Author("<think>" + "x" * 500, end_text="</think>\n\n", answer="42")
    reply, policy, sampler = sample_reply(ByteChat(), author)
    assert reply.text == "42"
    assert reply.thinking.endswith("... enough.")
    (turn,) = policy.turns
    assert (turn.stop, turn.version) == ("stop", 3)
    forced_count = len(f"{PHRASE}\n</think>\n\n")
    np.testing.assert_array_equal(np.flatnonzero(~turn.sampled_mask), np.arange(40, 40 + forced_count))
    assert not turn.logprobs[~turn.sampled_mask].any()
    assert (turn.logprobs[turn.sampled_mask] == -1).all()
    first, second = sampler.requests
    second_prompt = np.concatenate([first.prompt.tokens, turn.completion[: 40 + forced_count]])
    np.testing.assert_array_equal(second.prompt.tokens, second_prompt)
    assert second.sampling.max_tokens == 400 - len(second_prompt) - 10
    assert len(set(author.seeds)) == 2


def test_forced_tokens_carry_no_advantage_and_the_rest_does() -> None:
    _, policy, _ = sample_reply(ByteChat(), Author("<think>" + "x" * 500, end_text="</think>\n\n", answer="42"))
    played = replace(episode(1.0), turns=policy.turns)
    ((_, datum),) = episode_data(played, np.array([2.5]))
    turn = policy.turns[0]
    advantages = datum.advantages[-len(turn.completion) :]
    np.testing.assert_array_equal(advantages, np.where(turn.sampled_mask, 2.5, 0))


def test_finished_reply_or_missing_setting_forces_nothing() -> None:
    author = Author("<think>short</think>done", end_text="never", answer="")
    assert sample_reply(ByteChat(), author)[0].text == "done"
    reply, policy, _ = sample_reply(ByteChat(), Author("x" * 500, end_text="y", answer=""), forcing=None)
    assert (reply.truncated, len(policy.turns[0].completion)) == (True, 40)


def test_reply_stays_truncated_if_the_context_is_full() -> None:
    small = replace(FORCING, context_tokens=70)
    reply, policy, sampler = sample_reply(ByteChat(), Author("x" * 500, end_text="y", answer=""), forcing=small)
    assert reply.truncated
    assert policy.turns[0].sampled_mask.all()
    assert len(sampler.requests) == 1


def test_share_of_forced_replies_is_a_metric() -> None:
    _, forced, _ = sample_reply(ByteChat(), Author("<think>" + "x" * 500, end_text="</think>\n\n", answer="42"))
    _, free, _ = sample_reply(ByteChat(), Author("fine", end_text="never", answer=""))
    played = [replace(episode(1.0, member=n), turns=policy.turns) for n, policy in enumerate((forced, free))]
    metrics = group_metrics([Group("env", "task", 0, tuple(played))], prefix="env")
    assert metrics["env/env/budget_forced"] == 0.5
    assert "env/env/budget_forced" not in group_metrics([Group("env", "task", 0, (played[1],))], prefix="env")


@pytest.mark.parametrize(
    ("model", "renderer", "thinking"),
    [
        ("openai/gpt-oss-20b", None, "<|channel|>analysis<|message|>Let me think"),
        ("Qwen/Qwen3-8B", None, "<think>\nLet me think"),
        ("Qwen/Qwen3-8B", "qwen3_instruct", "Let me think"),
    ],
)
def test_real_formats_separate_the_answer_from_the_thinking(model: str, renderer: str | None, thinking: str) -> None:
    tokenizer = load_tokenizer(model, with_weights=False, note=lambda message: None)
    chat = chat_format(model, tokenizer, renderer=renderer)

    def tokens(text: str) -> Tokens:
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)

    prompt: Prompt = chat.render(ASKED)
    thought = tokens(thinking + " about it" * 20)
    last_words = chat.close_thinking(prompt, thought, PHRASE)
    stop = np.array([stop_token for stop_token in chat.stop if isinstance(stop_token, int)][:1], np.int32)
    answer = np.concatenate([tokens("The answer is 42."), stop])
    message = chat.parse(np.concatenate([thought, last_words, answer])).message
    text = str(message["content"])
    assert text.endswith("The answer is 42.")
    if renderer != "qwen3_instruct":
        assert text == "The answer is 42."
        assert "enough" in message.get("thinking", "")
    assert not len(chat.close_thinking(prompt, np.concatenate([thought, last_words, tokens("The")]), PHRASE)) or (
        renderer == "qwen3_instruct"
    )


class Say(rlkit.SingleTurnEnv):
    def __init__(self, number: int) -> None:
        self.task_id = str(number)

    def prompt(self) -> list[Message]:
        return [{"role": "user", "content": self.task_id}]

    def grade(self, reply: Reply) -> float:
        return len(reply.text) % 3


@pytest.mark.slow
def test_run_trains_on_thinking_and_answer_and_passes_the_audit(
    byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    result = rlkit.train(
        model=str(byte_model_dir),
        envs=[Say(number) for number in range(2)],
        steps=1,
        batch={"groups": 2, "group_size": 3},
        sampling={"max_tokens": 6, "budget_forcing": {"context_window_tokens": 128, "phrase": PHRASE}},
        trackers=[],
    )
    line = result.metrics
    assert line["env/all/budget_forced"] > 0.5
    assert line["env/all/tokens/max"] > 6
    assert abs(line["optim/kl_sample_train_v1"]) < 1e-6  # each log-probability belongs to its token
    (report,) = asyncio.run(audit(result.directory, max_tokens=None, overlong="truncate")).values()
    assert report.mismatch is None
    assert report.tokens == line["env/all/tokens/mean"] * 6


def test_window_without_room_for_an_answer_is_an_error() -> None:
    from rlkit.config.loading.load import load_config

    values = ["envs.a.env=arithmetic", "sampling.max_tokens=100", "sampling.budget_forcing.context_window_tokens=100"]
    with pytest.raises(ConfigError, match="leaves no room"):
        load_config([], values)
