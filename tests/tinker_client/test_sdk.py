"""The SDK adapter against the embedded engine: what the service refuses is told in rlkit's own errors."""

from __future__ import annotations

import asyncio
import logging
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
from rlkit.tinker_client.connector import ServiceAddress
from rlkit.tinker_client.sdk import TinkerService, capture_warnings
from rlkit.tinker_client.sdk_types import model_input
from rlkit.types import IMAGE_TOKEN, Datum, Image, Prompt, Sampling, as_prompt


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(threads=1, root=tmp_path_factory.mktemp("engine")) as server:
        yield server


def run_with_service(engine: EngineServer, coroutine):
    """Run `coroutine(service)` on a connection to the engine."""

    async def run():
        async with TinkerService(ServiceAddress(base_url=engine.url, api_key=engine.api_key)) as service:
            return await coroutine(service)

    return asyncio.run(run())


def test_a_sampler_draws_the_same_completion_for_the_same_seed(engine: EngineServer, byte_model_dir: Path) -> None:
    async def draw(service: TinkerService):
        sampler = await service.sampler(model=str(byte_model_dir))
        return [
            (await sampler.sample(as_prompt([65, 66]), Sampling(max_tokens=8, stop=("\x00",)), seed=seed))[0]
            for seed in (1, 1, 2)
        ]

    first, again, other = run_with_service(engine, draw)
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    np.testing.assert_array_equal(first.logprobs, again.logprobs)
    assert (first.tokens.dtype, first.logprobs.dtype, first.stop) == (np.int32, np.float32, "length")


def test_updates_change_the_weights_and_count_versions(engine: EngineServer, byte_model_dir: Path) -> None:
    async def learn(service: TinkerService):
        learner = await service.learner(model=str(byte_model_dir), lora=LoraConfig(), seed=1)
        sampler_before = await learner.sampler(0)
        advantages = np.array([0, 1, 1], np.float32)
        datum = Datum(
            as_prompt([65, 66, 67]),
            np.array([66, 67, 68], np.int32),
            np.array([0, -5, -5], np.float32),
            advantages,
            advantages > 0,
        )
        gradients, sampler_after = [], None
        for version in (1, 2, 3):  # each step's requests stand in the queue together
            gradients.append(learner.gradient([datum], ImportanceSampling()))
            learner.step(OptimizerConfig(), learning_rate=1e-2)
            sampler_after = learner.sampler(version)
        assert sampler_after is not None
        return (
            sampler_before.version,
            (await sampler_after).version,
            [(await g).logprobs[0][1:].sum() for g in gradients],
        )

    sampler_before, sampler_after, likelihoods = run_with_service(engine, learn)
    assert (sampler_before, sampler_after) == (0, 3)
    assert likelihoods[0] < likelihoods[1] < likelihoods[2]


def test_scorer_returns_the_sampled_logprobs_of_the_last_tokens(engine: EngineServer, byte_model_dir: Path) -> None:
    async def ask(service: TinkerService):
        sampler = await service.sampler(model=str(byte_model_dir))
        compute_score = await service.scorer(model=str(byte_model_dir))
        prompt = as_prompt([65, 66, 67])
        (completion,) = await sampler.sample(prompt, Sampling(max_tokens=6, stop=("\x00",)), seed=3)
        sequence = prompt + as_prompt(completion.tokens)
        return completion, await compute_score(sequence, 6, 0), await compute_score(sequence, 8, 4)

    completion, scores, more = run_with_service(engine, ask)
    assert scores.logprobs.dtype == np.float32
    assert scores.top_tokens.shape == (6, 0)
    np.testing.assert_allclose(scores.logprobs, completion.logprobs, atol=1e-5)
    np.testing.assert_allclose(more.logprobs[-6:], scores.logprobs, atol=1e-6)
    assert more.logprobs.shape == (8,)
    assert more.top_tokens.shape == more.top_logprobs.shape == (8, 4)
    is_likeliest = more.top_tokens[-6:] == completion.tokens[:, None]
    assert (more.top_logprobs[:, 0] >= more.logprobs).all()
    np.testing.assert_allclose(more.top_logprobs[-6:][is_likeliest], scores.logprobs[is_likeliest.any(1)], atol=1e-6)


def test_unknown_checkpoint_is_a_usage_error(engine: EngineServer, byte_model_dir: Path) -> None:
    with pytest.raises(UsageError, match="tinker://nobody:train:0/weights/none"):
        run_with_service(
            engine,
            lambda s: s.learner(
                model=str(byte_model_dir), lora=LoraConfig(), seed=0, checkpoint="tinker://nobody:train:0/weights/none"
            ),
        )


@pytest.mark.slow
def test_rejected_key_is_reported_by_its_variable(engine: EngineServer, byte_model_dir: Path, tmp_path: Path) -> None:
    """In a process of its own, since the SDK never closes the connection of a session that was refused."""
    (tmp_path / "a.yaml").write_text(f"envs: {{arithmetic: {{}}}}\nmodel: {byte_model_dir}")
    environ = {**os.environ, "TINKER_BASE_URL": engine.url, "TINKER_API_KEY": "tml-wrong-key"}
    command = [sys.executable, "-m", "rlkit", "eval", str(tmp_path / "a.yaml")]
    completed = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert completed.returncode == 3
    assert "check TINKER_API_KEY" in completed.stderr
    assert "tml-wrong-key" not in completed.stdout + completed.stderr
    assert "Traceback" not in completed.stderr


def test_malformed_key_is_an_error_before_any_request() -> None:
    async def connect() -> None:
        async with TinkerService(ServiceAddress(base_url="http://127.0.0.1:9", api_key="not-a-key")) as service:
            await service.sampler(model="any")

    with pytest.raises(MissingError, match="TINKER_API_KEY"):
        asyncio.run(connect())


def test_images_become_chunks_between_runs_of_tokens() -> None:
    tokens = np.array([1, IMAGE_TOKEN, IMAGE_TOKEN, 2, 3], np.int32)
    chunks = model_input(Prompt(tokens, (Image(1, 2, b"data", "png"),))).chunks
    assert [chunk.type for chunk in chunks] == ["encoded_text", "image", "encoded_text"]
    assert [chunk.length for chunk in chunks] == [1, 2, 2]
    assert ServiceError("x", request_id="r").request_id == "r"


def test_deleted_checkpoint_is_gone(engine: EngineServer, byte_model_dir: Path) -> None:
    async def run(service: TinkerService) -> None:
        learner = await service.learner(model=str(byte_model_dir), lora=LoraConfig(), seed=1)
        for path in await learner.save("short-lived", ttl_s=None):
            await service.delete(path)
            with pytest.raises(UsageError, match="deleting tinker://"):
                await service.delete(path)
        with pytest.raises(UsageError, match=path):
            await service.sampler(model=str(byte_model_dir), checkpoint=path)

    run_with_service(engine, run)


def test_process_can_connect_to_one_service_repeatedly(engine: EngineServer, byte_model_dir: Path) -> None:
    context_sizes = [
        run_with_service(engine, lambda service: service.context_tokens(str(byte_model_dir))) for _ in range(3)
    ]
    assert context_sizes[0] == context_sizes[1] == context_sizes[2]


def test_the_first_line_of_a_warning_is_captured() -> None:
    logger, warnings = logging.getLogger("tinker.lib.queue"), list[str]()
    with capture_warnings(warnings.append):
        logger.warning("Sampling is paused. Reason: billing\nmore")
        logger.info("no warning")
    logger.warning("too late")
    assert warnings == ["Sampling is paused. Reason: billing"]
