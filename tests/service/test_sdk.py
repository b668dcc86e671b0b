"""The SDK adapter against the embedded engine: what the service refuses is told in rlkit's own errors."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlkit.algorithms.losses import ImportanceSampling
from rlkit.config.schema.objective import LoraConfig, OptimizerConfig
from rlkit.engine import EngineServer
from rlkit.errors import MissingError, ServiceError, UsageError
from rlkit.service.sdk import TinkerService, model_input
from rlkit.types import IMAGE_TOKEN, Datum, Image, Prompt, Sampling, as_prompt


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(threads=1, root=tmp_path_factory.mktemp("engine")) as server:
        yield server


def on(engine: EngineServer, coroutine):
    """Run `coroutine(service)` on a connection to the engine."""

    async def run():
        async with TinkerService(base_url=engine.url, api_key=engine.api_key) as service:
            return await coroutine(service)

    return asyncio.run(run())


def test_a_sampler_draws_the_same_completion_for_the_same_seed(engine: EngineServer, byte_model_dir: Path) -> None:
    async def draw(service: TinkerService):
        sampler = await service.sampler(model=str(byte_model_dir))
        return [
            (await sampler.sample(as_prompt([65, 66]), Sampling(max_tokens=8, stop=("\x00",)), seed=seed))[0]
            for seed in (1, 1, 2)
        ]

    first, again, other = on(engine, draw)
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    np.testing.assert_array_equal(first.logprobs, again.logprobs)
    assert (first.tokens.dtype, first.logprobs.dtype, first.stop) == (np.int32, np.float32, "length")


def test_an_update_moves_the_weights_and_counts_versions(engine: EngineServer, byte_model_dir: Path) -> None:
    async def learn(service: TinkerService):
        learner = await service.learner(model=str(byte_model_dir), lora=LoraConfig(), seed=1)
        before = await learner.sampler(0)
        advantages = np.array([0, 1, 1], np.float32)
        datum = Datum(
            as_prompt([65, 66, 67]),
            np.array([66, 67, 68], np.int32),
            np.array([0, -5, -5], np.float32),
            advantages,
            advantages > 0,
        )
        gradients, after = [], None
        for version in (1, 2, 3):  # each step's requests stand in the queue together
            gradients.append(learner.gradient([datum], ImportanceSampling()))
            learner.step(OptimizerConfig(), learning_rate=1e-2)
            after = learner.sampler(version)
        assert after is not None
        return before.version, (await after).version, [(await g).logprobs[0][1:].sum() for g in gradients]

    before, after, likelihoods = on(engine, learn)
    assert (before, after) == (0, 3)
    assert likelihoods[0] < likelihoods[1] < likelihoods[2]


def test_a_scorer_gives_the_log_probabilities_of_the_last_tokens_as_they_were_sampled(
    engine: EngineServer, byte_model_dir: Path
) -> None:
    async def ask(service: TinkerService):
        sampler = await service.sampler(model=str(byte_model_dir))
        scorer = await service.scorer(model=str(byte_model_dir))
        prompt = as_prompt([65, 66, 67])
        (drawn,) = await sampler.sample(prompt, Sampling(max_tokens=6, stop=("\x00",)), seed=3)
        whole = prompt + as_prompt(drawn.tokens)
        return drawn, await scorer.logprobs(whole, last=6), await scorer.logprobs(whole, last=8)

    drawn, scores, more = on(engine, ask)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, drawn.logprobs, atol=1e-5)
    np.testing.assert_allclose(more[-6:], scores, atol=1e-6)
    assert more.shape == (8,)


def test_an_unknown_checkpoint_is_the_users_mistake(engine: EngineServer, byte_model_dir: Path) -> None:
    with pytest.raises(UsageError, match="tinker://nobody:train:0/weights/none"):
        on(
            engine,
            lambda s: s.learner(
                model=str(byte_model_dir), lora=LoraConfig(), seed=0, checkpoint="tinker://nobody:train:0/weights/none"
            ),
        )


@pytest.mark.slow
def test_a_refused_key_names_the_variable_and_not_the_key(
    engine: EngineServer, byte_model_dir: Path, tmp_path: Path
) -> None:
    """In a process of its own, since the SDK never closes the connection of a session that was refused."""
    (tmp_path / "a.yaml").write_text(f"envs: {{arithmetic: {{}}}}\nmodel: {byte_model_dir}")
    environ = {**os.environ, "TINKER_BASE_URL": engine.url, "TINKER_API_KEY": "tml-wrong-key"}
    command = [sys.executable, "-m", "rlkit", "eval", str(tmp_path / "a.yaml")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "check TINKER_API_KEY" in done.stderr
    assert "tml-wrong-key" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_that_is_none_is_refused_before_anything_is_sent() -> None:
    async def connect() -> None:
        async with TinkerService(base_url="http://127.0.0.1:9", api_key="not-a-key") as service:
            await service.sampler(model="any")

    with pytest.raises(MissingError, match="TINKER_API_KEY"):
        asyncio.run(connect())


def test_images_become_chunks_between_runs_of_tokens() -> None:
    tokens = np.array([1, IMAGE_TOKEN, IMAGE_TOKEN, 2, 3], np.int32)
    chunks = model_input(Prompt(tokens, (Image(1, 2, b"data", "png"),))).chunks
    assert [chunk.type for chunk in chunks] == ["encoded_text", "image", "encoded_text"]
    assert [chunk.length for chunk in chunks] == [1, 2, 2]
    assert ServiceError("x", request_id="r").request_id == "r"


def test_a_checkpoint_that_is_deleted_is_gone(engine: EngineServer, byte_model_dir: Path) -> None:
    async def run(service: TinkerService) -> None:
        learner = await service.learner(model=str(byte_model_dir), lora=LoraConfig(), seed=1)
        for path in await learner.save("short-lived", ttl_s=None):
            await service.delete(path)
            with pytest.raises(UsageError, match="deleting tinker://"):
                await service.delete(path)
        with pytest.raises(UsageError, match=path):
            await service.sampler(model=str(byte_model_dir), checkpoint=path)

    on(engine, run)


def test_a_process_can_connect_to_one_service_again_and_again(engine: EngineServer, byte_model_dir: Path) -> None:
    found = [on(engine, lambda service: service.context_tokens(str(byte_model_dir))) for _ in range(3)]
    assert found[0] == found[1] == found[2]
