"""A real run for the pages, trained on the simulated service by a model that follows a script.

    python -m tests.view.browser.recorded_run DIRECTORY [--steps N] [--wait]

It has two environments, an evaluation, tool calls, forced tokens, a fork, failures with retries, truncated and masked
episodes, folders of trials and renderers of the environments. The model gets better with each sample.

With `--wait`, the run goes on after each step only when its standard input has a line.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

import rlkit
from rlkit._util import threads
from rlkit.chat.format import ChatFormat
from rlkit.chat.renderers import TemplateChat
from rlkit.config.loading.load import load_config
from rlkit.store import RunStore
from rlkit.testing import Latency, SimulatedTinker, tiny_model
from rlkit.testing.futures import SimulatedFuture
from rlkit.testing.simulated_service import SimulatedSamplingClient
from rlkit.training.trainer import RLTrainer
from rlkit.types import Outcome, Tool, ToolCall

MAX_TOKENS = 120
AT_ONCE = Latency(first_s=0.001, token_s=0, gradient_s=0.001, step_s=0.001, save_s=0.001, load_s=0.001)
PRICES = {"tea": {"green": 4, "black": 3, "mint": 5}, "coffee": {"mocha": 9, "java": 7}, "jam": {"plum": 2, "fig": 6}}
SEARCH: Tool = {
    "name": "search",
    "description": "List the prices of a kind of goods.",
    "parameters": {"type": "object", "properties": {"kind": {"type": "string"}}},
}
BUY: Tool = {
    "name": "buy",
    "description": "Buy an item.",
    "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
}
RENDERER = """
const list = document.createElement("ol");
for (const turn of episode.turns) list.append(Object.assign(document.createElement("li"), {textContent: turn.stop}));
document.body.append("Basket of " + episode.task, list);
"""


class Sums(rlkit.Env):
    """Add two numbers. The beginning of the answer is forced."""

    def __init__(self, left: int, right: int) -> None:
        self.task_id = f"{left} + {right}"
        self.total = left + right

    async def rollout(self, policy: rlkit.Policy) -> Outcome:
        question: list[rlkit.Message] = [
            {"role": "system", "content": "You add numbers."},
            {"role": "user", "content": f"What is {self.task_id}?"},
        ]
        reply = await policy.chat(question)
        request: rlkit.Message = {"role": "user", "content": "So? The sum is what?"}
        answer = await policy.chat([*question, reply.message, request], forced="The sum is ")
        numbers = re.findall(r"-?\d+", answer.text)
        is_right = numbers[-1:] == [str(self.total)]
        view = {"html": f"<h1>{self.task_id}</h1><p>right: <b>{is_right}</b></p>"}
        labels = {"size": "large" if self.total > 60 else "small"}
        info = {"answer": numbers[-1:], "expected": self.total, "labels": labels, "view": view}
        return Outcome(float(is_right), {"correct": float(is_right)}, info, truncated=reply.truncated)


@dataclass
class Basket:
    """What an episode of `Shop` did."""

    bought: list[str] = field(default_factory=list[str])
    is_skipped: bool = False


class Shop(rlkit.ToolEnv[Basket]):
    """Buy the cheapest item of a kind."""

    max_turns = 4

    def __init__(self, kind: str, trials: Path) -> None:
        self.task_id = f"cheapest {kind}"
        self.kind = kind
        self.trials = trials

    def reset(self) -> tuple[Basket, Sequence[rlkit.Message]]:
        return Basket(), [{"role": "user", "content": f"Find the cheapest {self.kind} and buy it."}]

    def tools(self) -> Sequence[Tool]:
        return [SEARCH, BUY]

    async def call(self, state: Basket, call: ToolCall) -> str:
        if call["name"] == "search":
            return json.dumps(PRICES[self.kind])
        item = str(call["arguments"]["item"])
        if item == "everything":
            raise ConnectionError(f"the till of the shop did not answer about {self.kind}")
        state.bought.append(item)
        state.is_skipped = item == "nothing"
        return f"You bought {item}."

    async def grade(self, state: Basket, reply: rlkit.Reply | None) -> Outcome:
        prices = PRICES[self.kind]
        is_right = state.bought == [min(prices, key=prices.__getitem__)]
        info: Mapping[str, Any] = {
            "trial": str(write_trial(self.trials, self.kind, state.bought)),
            "view": {"script": RENDERER},
        }
        metrics = {"spent": float(sum(prices.get(item, 0) for item in state.bought))}
        return Outcome(float(is_right), metrics, info, masked=state.is_skipped)

    async def rollout(self, policy: rlkit.Policy) -> Outcome:
        outcome = await super().rollout(policy)
        opening = self.reset()[1]  # a fork: another question after the first reply
        first = policy.turns[0].messages[-1]
        await policy.chat([*opening, first, {"role": "user", "content": "How sure are you?"}], tools=self.tools())
        return outcome


def write_trial(trials: Path, kind: str, bought: Sequence[str]) -> Path:
    """Write a folder of a trial as Harbor leaves it, with a link that leads outside."""
    folder = trials / f"{kind}-{len(list(trials.glob(f'{kind}-*')))}"
    (folder / "agent").mkdir(parents=True)
    (folder / "verifier").mkdir()
    (folder / "artifacts").mkdir()
    events = [[0.1, "o", "$ buy \u001b[1mtea\u001b[0m\r\n"], [0.4, "o", f"bought {bought}\r\n"]]
    lines = [json.dumps({"version": 2, "width": 80, "height": 24}), *map(json.dumps, events)]
    (folder / "agent" / "recording.cast").write_text("\n".join(lines) + "\n")
    (folder / "verifier" / "test-stdout.txt").write_text(f"1 passed: the basket holds {len(bought)} items\n")
    (folder / "artifacts" / "receipt.txt").write_text(f"receipt of {kind}\n" + "\n".join(bought))
    (folder / "artifacts" / "outside.txt").symlink_to("/etc/hostname")
    (folder / "result.json").write_text("{}")
    return folder


class Author:
    """A model that solves a growing share of its tasks."""

    def __init__(self) -> None:
        self._samples = count()

    def write(self, text: str) -> str:
        number = next(self._samples)
        draw = random.Random(number)
        is_right = draw.random() < min(0.25 + number / 700, 0.95)
        if (sum_match := re.findall(r"What is (\d+) \+ (\d+)", text)) and "Find the cheapest" not in text:
            return self._add(text, *map(int, sum_match[-1]), draw, is_right=is_right)
        return self._buy(text, draw, is_right=is_right)

    def _add(self, text: str, left: int, right: int, draw: random.Random, *, is_right: bool) -> str:
        if "So?" not in text:
            if draw.random() < 0.1:
                return "and then I count on, " * 60
            tens, ones = left // 10 + right // 10, left % 10 + right % 10
            return f"I add **{left}** and **{right}**: the tens give {10 * tens}, the ones {ones}."
        return str(left + right if is_right else left + right + draw.choice([-10, -1, 1, 2]))

    def _buy(self, text: str, draw: random.Random, *, is_right: bool) -> str:
        if "How sure" in text:
            return f"I am {draw.randint(50, 99)} % sure."
        kind = re.findall(r"Find the cheapest (\w+)", text)[-1]
        if "tool_response" not in text:
            return f"I look at the prices first.\n{write_call('search', kind=kind)}"
        if "You bought" in text:
            return f"<think>\nThe {kind} is in the basket, so I am done.\n</think>\n\nI bought the cheapest {kind}."
        prices, chance = PRICES[kind], draw.random()
        if chance < 0.12:
            return write_call("buy", item="everything")
        if chance < 0.2:
            return write_call("buy", item="nothing")
        if chance < 0.28:
            return write_call("search", kind=kind)
        best = min(prices, key=prices.__getitem__)
        return write_call("buy", item=best if is_right else draw.choice(sorted(set(prices) - {best})))


def write_call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def script_samples(patched: pytest.MonkeyPatch, chat: ChatFormat, author: Author) -> None:
    """Replace the samples of the simulated service by what an author writes."""
    original = SimulatedSamplingClient.sample

    def sample(
        self: SimulatedSamplingClient, prompt: tinker.ModelInput, num_samples: int, params: types.SamplingParams
    ) -> Any:
        answer = original(self, prompt, num_samples, params)
        text = chat.decode(np.asarray(prompt.to_ints(), np.int32))
        stop = np.array(chat.stop, np.int32)[:1]
        replies = [np.append(chat.encode(author.write(text)), stop) for _ in range(num_samples)]

        async def replace_tokens() -> types.SampleResponse:
            sequences = (await answer).sequences
            pairs = zip(sequences, replies, strict=True)
            return types.SampleResponse([make_sequence(one, reply, params.max_tokens) for one, reply in pairs])

        return SimulatedFuture(replace_tokens())

    patched.setattr(SimulatedSamplingClient, "sample", sample)


def make_sequence(sampled: types.SampledSequence, tokens: Any, limit: int | None) -> types.SampledSequence:
    count_max = limit or len(tokens)
    logprobs = -np.random.default_rng(len(tokens)).exponential(1.2, len(tokens))
    return types.SampledSequence(
        stop_reason="length" if len(tokens) > count_max else "stop",
        sequence_id=sampled.sequence_id,
        tokens_np=tokens[:count_max].astype(np.int32),
        logprobs_np=logprobs[:count_max].astype(np.float32),
    )


def wait_after_each_step(patched: pytest.MonkeyPatch) -> None:
    """Hold the whole run when a step is recorded, until the standard input has a line or ends.

    Step 0, the evaluation before training, does not count.
    """
    original = RunStore.add_metrics

    def add_metrics(self: RunStore, step: int, metrics: Mapping[str, float]) -> None:
        original(self, step, metrics)
        if step:
            sys.stdin.readline()

    patched.setattr(RunStore, "add_metrics", add_metrics)


def make_evaluation() -> Sequence[rlkit.Env]:
    """Return the tasks of the evaluation."""
    return [Sums(10 * number + 7, 25) for number in range(6)]


def record(directory: Path, *, steps: int, learning_rate: float, is_gated: bool = False) -> None:
    """Record a run."""
    from transformers import AutoTokenizer

    model = tiny_model(directory.parent / ".models" / directory.name)
    chat = TemplateChat(AutoTokenizer.from_pretrained(model))
    draw = random.Random(3)
    sums = [Sums(draw.randint(10, 59), draw.randint(10, 59)) for _ in range(60)]
    shop = [Shop(kind, directory.parent / ".trials" / directory.name) for kind in PRICES] * 20
    held_out = {"env": "tests.view.browser.recorded_run:make_evaluation", "attempts": 3}
    settings: Mapping[str, Any] = {
        "model": "simulated",
        "steps": steps,
        "envs": {"sums": {"weight": 2.0}, "shop": {}},
        "eval": {"every": 4, "envs": {"held_out": held_out}},
        "batch": {"groups": 6, "group_size": 4},
        "sampling": {"max_tokens": MAX_TOKENS},
        "rollouts": {"max_retries": 1},
        "optimizer": {"learning_rate": learning_rate},
        "checkpoint": {"every": 4},
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        script_samples(patched, chat, Author())
        if is_gated:
            wait_after_each_step(patched)
        trainer = RLTrainer(
            load_config([], settings=settings),
            envs={"sums": sums, "shop": shop},
            trackers=[],
            directory=directory,
            service=SimulatedTinker(latency=AT_ONCE),
            chat=chat,
        )
        threads.run(trainer.train())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--wait", action="store_true")
    options = parser.parse_args()
    record(options.directory, steps=options.steps, learning_rate=options.learning_rate, is_gated=options.wait)
