"""Many clients at once: 16 SDK clients, 4 models of two families, 1,000 futures; each gets its own model's answers."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from rlkit.engine import EngineServer

from .conftest import connect
from .helpers import ce_datum, prompt

CLIENTS = 16
STEPS = 6
SAMPLES = 50
MODELS = (("llama", 1), ("llama", 2), ("qwen3", 1), ("qwen3", 2))
"""Base models and adapter seeds."""


class Client:
    """Client that trains a little and samples a lot, from the model of its number."""

    def __init__(self, server: EngineServer, number: int) -> None:
        self._server = server
        self._base, self._seed = MODELS[number % len(MODELS)]

    def run(self) -> list[object]:
        """All that it was answered, in order."""
        with connect(self._server) as service:
            trainer = service.create_lora_training_client(self._base, rank=4, seed=self._seed).result()
            answers = self._train(trainer)
            sampler = trainer.save_weights_and_get_sampling_client().result()
            futures = [self._sample(sampler, i) for i in range(SAMPLES)]
            for future in futures:
                response = future.result()
                answers += [list(response.prompt_logprobs or []), *(list(s.tokens) for s in response.sequences)]
                answers += [tuple(np.asarray(s.logprobs)) for s in response.sequences]
        return answers

    def _train(self, trainer: tinker.TrainingClient) -> list[object]:
        """Losses of steps that are all sent before the first is answered."""
        losses: list[tinker.APIFuture[types.ForwardBackwardOutput]] = []
        norms: list[tinker.APIFuture[types.OptimStepResponse]] = []
        for step in range(STEPS):
            losses.append(trainer.forward_backward([ce_datum([self._seed, step, 7, 9])], "cross_entropy"))
            norms.append(trainer.optim_step(types.AdamParams(learning_rate=0.02)))
        return [*(f.result().metrics for f in losses), *(f.result().metrics for f in norms)]

    def _sample(self, sampler: tinker.SamplingClient, i: int) -> tinker.APIFuture[types.SampleResponse]:
        params = types.SamplingParams(max_tokens=2 + i % 3, seed=i, temperature=float(i % 2), stop=[])
        return sampler.sample(prompt(1, 2, i), 1, params, include_prompt_logprobs=i % 5 == 0)


def run_all(server: EngineServer, numbers: Sequence[int]) -> list[list[object]]:
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(lambda number: Client(server, number).run(), numbers))


@pytest.mark.slow
def test_sixteen_clients_get_the_answers_that_each_gets_alone(resolve: Callable[[str], Path], tmp_path: Path) -> None:
    assert CLIENTS * (2 * STEPS + SAMPLES + 2) > 1000
    with EngineServer(root=tmp_path, resolve=resolve) as server:
        alone = [run_all(server, [number])[0] for number in range(len(MODELS))]
        assert len({repr(answers) for answers in alone}) == len(MODELS)
        together = run_all(server, range(CLIENTS))
        for number, answers in enumerate(together):
            assert repr(answers) == repr(alone[number % len(MODELS)]), number
        service = server._service  # pyright: ignore[reportPrivateUsage] what is left is seen nowhere else
        assert list(service.sessions) == []
        assert service.promises.with_prefix("") == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_session_leaves_no_memory_behind(resolve: Callable[[str], Path], tmp_path: Path) -> None:
    def resident_bytes() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with EngineServer(root=tmp_path, resolve=resolve) as server:
        for number in range(4):
            Client(server, number).run()
        before = resident_bytes()
        for number in range(4):
            Client(server, number).run()
        assert resident_bytes() - before < 32 << 20
