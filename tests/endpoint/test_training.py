"""Training through the endpoint equals training with `policy.chat`, token for token, on the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

import rlkit
from rlkit.store.history import load_history
from rlkit.tools.audit import audit

QUESTIONS = ("more", "and more", "once more")
STEPS = 8


def share_of_letters(texts: Sequence[str]) -> float:
    """Reward letters; a random model of bytes writes few, and learns to write more."""
    text = "".join(texts)
    return sum(letter.isascii() and letter.isalpha() for letter in text) / max(len(text), 1)


class Chatting(rlkit.Env):
    async def rollout(self, policy: rlkit.Policy) -> float:
        messages, texts = list[rlkit.Message](), list[str]()
        for question in QUESTIONS:
            reply = await policy.chat([*messages, {"role": "user", "content": question}])
            messages += [{"role": "user", "content": question}, reply.message]
            texts.append(reply.text)
        return share_of_letters(texts)


async def chat_as_client(client: Any) -> float:
    messages, texts = list[Any](), list[str]()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        completion = await client.chat.completions.create(model="policy", messages=messages)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        texts.append(message.content)
    return share_of_letters(texts)


async def stream_as_client(client: Any) -> float:
    messages, texts = list[Any](), list[str]()
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        text = ""
        async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
            text += chunk.choices[0].delta.content or ""
        messages.append({"role": "assistant", "content": text})
        texts.append(text)
    return share_of_letters(texts)


def train(env: rlkit.Env, model: Path) -> rlkit.RunResult:
    return rlkit.train(
        envs=[env],
        model=str(model),
        steps=STEPS,
        batch={"groups": 2, "group_size": 8},
        sampling={"max_tokens": 16},
        optimizer={"learning_rate": 0.01},
        seed=3,
        trackers=[],
    )


def describe(result: rlkit.RunResult) -> list[object]:
    """Every token of a run with its parent and log-probability, and every reward."""
    history = load_history(result.directory)
    return [
        (
            episode.reward,
            [(t.prompt.tokens.tolist(), t.completion.tolist(), t.logprobs.tolist(), t.parent) for t in episode.turns],
        )
        for step in range(1, history.step + 1)
        for member in history.groups(step)
        for episode in member.group.episodes
    ]


@pytest.mark.parametrize("function", [chat_as_client, pytest.param(stream_as_client, marks=pytest.mark.slow)])
def test_a_run_through_the_endpoint_equals_a_run_with_chat(
    function: Any, byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    expected = train(Chatting(), byte_model_dir)
    result = train(rlkit.CallableEnv(function), byte_model_dir)
    assert describe(result) == describe(expected)
    history = load_history(result.directory)
    means = [
        sum(float(episode.reward or 0) for member in history.groups(step) for episode in member.group.episodes)
        for step in (1, STEPS)
    ]
    assert means[1] > 1.2 * means[0], "the model learns"
    (report,) = asyncio.run(audit(result.directory)).values()
    assert report.mismatch is None
    assert report.tokens > 0


class Address(rlkit.Env):
    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
        async with (
            policy.endpoint() as endpoint,
            openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client,
        ):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
            return rlkit.Outcome(1.0, info={"root": endpoint.root})


def test_clients_elsewhere_get_the_host_of_the_configuration(
    byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    result = rlkit.train(
        envs=[Address()],
        model=str(byte_model_dir),
        steps=1,
        batch={"groups": 1, "group_size": 2},
        sampling={"max_tokens": 4},
        rollouts={"endpoint_host": "localhost"},
        trackers=[],
    )
    (group,) = load_history(result.directory).groups(1)
    assert all(str(episode.info["root"]).startswith("http://localhost:") for episode in group.group.episodes)
