"""Images keep their positions in sampling, recording, training and resuming."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tinker import types

import rlkit
from rlkit.testing import ByteChat, World
from rlkit.testing.simulated_service import SimulatedSamplingClient, SimulatedTrainingClient
from rlkit.types import IMAGE_TOKEN, Image, Prompt, join

from .simulation import Simulation

LENGTH = 3
MARK = 0
CAT, DOG = b"\x89PNG cat", b"\x89PNG dog"
PICTURES = {"cat.png": CAT, "dog.png": DOG}

type Chunks = list[list[int] | bytes]


class SeeingChat(ByteChat):
    """Render images as `LENGTH` tokens each."""

    def render(self, messages: Sequence[rlkit.Message], tools: Sequence[rlkit.Tool] = ()) -> Prompt:
        plain, images = list[rlkit.Message](), list[bytes]()
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                images += [PICTURES[part["image"]] for part in content if part["type"] == "image"]
                content = "".join(part["text"] if part["type"] == "text" else chr(MARK) for part in content)
            plain.append({**message, "content": content})
        tokens = super().render(plain, tools).tokens
        pieces = list[Prompt]()
        for index, run in enumerate(np.split(tokens, np.flatnonzero(tokens == MARK))):
            pieces += [make_picture(images[index - 1])] * (index > 0) + [Prompt(run[index > 0 :])]
        return join(pieces)


def make_picture(data: bytes) -> Prompt:
    return Prompt(np.full(LENGTH, IMAGE_TOKEN, np.int32), (Image(0, LENGTH, data, "png"),))


def make_message(text: str, *names: str) -> rlkit.Message:
    images: list[Any] = [{"type": "image", "image": name} for name in names]
    return {"role": "user", "content": [{"type": "text", "text": text}, *images, {"type": "text", "text": "?"}]}


class Looking(rlkit.StepEnv[None]):
    """Conversation about images."""

    max_turns = 3

    def __init__(self, number: int) -> None:
        self.task_id = f"task-{number}"
        self.prompts = list[Prompt]()

    def reset(self) -> tuple[None, list[rlkit.Message]]:
        return None, [make_message(self.task_id, "cat.png")]

    async def step(self, state: None, reply: rlkit.Reply) -> rlkit.Step:
        self.prompts.append(reply.tokens)
        answers = [make_message("compare", "dog.png", "cat.png"), {"role": "user", "content": "sure?"}]
        return rlkit.Step([answers[reply.turn.parent is not None]], reward=float(reply.text.count("e")))


class Continuing(rlkit.Env):
    """Conversation about images with prompts built from tokens."""

    def __init__(self, number: int) -> None:
        self.task_id = f"task-{number}"
        self.prompts = list[Prompt]()

    async def rollout(self, policy: rlkit.Policy) -> float:
        letters = Prompt(np.frombuffer(self.task_id.encode(), np.uint8).astype(np.int32))
        first = await policy.sample(join([make_picture(DOG), letters, make_picture(CAT)]))
        second = await policy.sample(join([first.tokens, letters, make_picture(DOG)]))
        self.prompts += [first.tokens, second.tokens]
        return float(second.text.count("e") + first.text.count("e"))


def split_into_chunks(prompt: Prompt) -> Chunks:
    """Split a prompt as the service receives it: runs of tokens, with images between them."""
    chunks: Chunks = []
    starts = {image.start: image for image in prompt.images}
    place = 0
    while place < len(prompt):
        if place in starts:
            chunks.append(starts[place].data)
            place += starts[place].length
        else:
            if not chunks or isinstance(chunks[-1], bytes):
                chunks.append([])
            chunks[-1].append(int(prompt.tokens[place]))  # type: ignore[union-attr]  a run of tokens
            place += 1
    return chunks


def list_chunks(model_input: types.ModelInput) -> Chunks:
    return [
        chunk.data if isinstance(chunk, types.ImageChunk) else [int(token) for token in chunk.tokens]  # type: ignore[union-attr]
        for chunk in model_input.chunks
    ]


@pytest.mark.parametrize("env", [Looking, Continuing])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_images_keep_their_positions_in_sampling_and_training(
    mode: str, env: type[Looking] | type[Continuing], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, sampled_prompts = list[types.Datum](), list[Chunks]()
    gradient, sample = SimulatedTrainingClient.forward_backward, SimulatedSamplingClient.sample

    def spy(self: SimulatedTrainingClient, data: Sequence[types.Datum], *args: Any) -> Any:
        trained.extend(data)
        return gradient(self, data, *args)

    def listen(self: SimulatedSamplingClient, prompt: types.ModelInput, *args: Any) -> Any:
        sampled_prompts.append(list_chunks(prompt))
        return sample(self, prompt, *args)

    monkeypatch.setattr(SimulatedTrainingClient, "forward_backward", spy)
    monkeypatch.setattr(SimulatedSamplingClient, "sample", listen)
    tasks = [env(number) for number in range(20)]
    run = Simulation(tmp_path / "run", World(), settings={"schedule": {"mode": mode}}, tasks=tasks, chat=SeeingChat())
    assert run.train().status == "completed"
    conversations = {
        str(split_into_chunks(Prompt(prompt.tokens[:-1], prompt.images))): prompt
        for task in tasks
        for prompt in task.prompts
    }
    assert len(trained) > 6
    for datum in trained:
        chunks = list_chunks(datum.model_input)
        assert [chunk for chunk in chunks if isinstance(chunk, bytes)] == (
            [CAT, DOG, CAT] if env is Looking else [DOG, CAT, DOG]
        )
        prompt = conversations[
            str(chunks)
        ]  # the datum is one of the conversations, token for token and image for image
        targets = np.asarray(datum.loss_fn_inputs["target_tokens"].data)
        assert datum.model_input.length == len(targets) == len(prompt) - 1
        is_text = prompt.tokens[1:] != IMAGE_TOKEN
        assert targets[is_text].tolist() == prompt.tokens[1:][is_text].tolist()
        advantages = np.asarray(datum.loss_fn_inputs["advantages"].data)
        assert not advantages[~is_text].any()
        assert advantages.any()
    starts = {str(chunks)[:40] for chunks in sampled_prompts}
    assert all(str(chunks)[:40] in starts for chunks in map(split_into_chunks, conversations.values()))
    episodes = pd.read_parquet(run.directory / "episodes")
    images = [image["data"] for turns in episodes.turns for turn in turns for image in turn["images"]]
    assert set(images) == {CAT, DOG}


def test_steps_with_images_are_replayed_from_the_disk(tmp_path: Path) -> None:
    def run(name: str, steps: int) -> Simulation:
        tasks = [Continuing(number) for number in range(20)]
        return Simulation(tmp_path / name, World(), settings={"steps": steps}, tasks=tasks, chat=SeeingChat())

    uninterrupted, resumed = run("whole", 3), run("again", 2)
    uninterrupted.train()
    resumed.train()
    resumed.world.checkpoints.clear()
    resumed.settings = {"steps": 3}
    resumed.train(resume=True)
    assert resumed.weights() == uninterrupted.weights()
    assert resumed.world.calls["samples"] == uninterrupted.world.calls["samples"]


def test_simulated_service_distinguishes_images(tmp_path: Path) -> None:
    def weights(name: str, data: bytes) -> list[float | None]:
        class One(Continuing):
            async def rollout(self, policy: rlkit.Policy) -> float:
                return float((await policy.sample(make_picture(data))).text.count("e"))

        tasks = [One(number) for number in range(20)]
        run = Simulation(tmp_path / name, World(), settings={"steps": 1}, tasks=tasks)
        run.train()
        return run.weights()

    assert weights("cat", CAT) == weights("cat-again", CAT)
    assert weights("cat-and", CAT) != weights("dog", DOG)
