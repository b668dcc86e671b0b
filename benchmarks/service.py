"""The simulated service with the methods that rlkit and two generations of its peer call, and a log of its requests.

The older peer awaits `…_async` methods and then `result_async()` of their results. The newer one awaits the results of
the plain methods. Seeds are ignored, so samples depend on the prompt only, whichever side requests them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from tinker import types

from rlkit.testing.simulated_service import (
    SimulatedClient,
    SimulatedFuture,
    SimulatedSamplingClient,
    SimulatedTinker,
    SimulatedTrainingClient,
)
from rlkit.testing.world import Latency, World


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """An optimiser step: its end, its sequences, and those with an advantage other than 0 (`teaching`)."""

    done_s: float
    sequences: int
    teaching: int


@dataclass(slots=True)
class Log:
    """Log of the simulated service."""

    began_s: float | None = None
    """Time of the first request for a sample."""
    steps: list[TrainedStep] = field(default_factory=list[TrainedStep])
    cpu_s: float = 0.0
    """CPU seconds of the simulation itself."""

    @contextmanager
    def computing(self) -> Generator[None]:
        """Count the CPU time of the block as the simulation's own."""
        began = time.thread_time()
        try:
            yield
        finally:
            self.cpu_s += time.thread_time() - began


class Reply[T](SimulatedFuture[T]):
    """A result that the older peer can await by `result_async`."""

    async def result_async(self) -> T:
        return await self


class Sampling(SimulatedSamplingClient):
    """Simulated sampling client."""

    def __init__(self, of: SimulatedSamplingClient, log: Log) -> None:
        super().__init__(of._world, of._latency, slots=None)
        self._log = log

    def sample(
        self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
    ) -> SimulatedFuture[types.SampleResponse]:
        if self._log.began_s is None:
            self._log.began_s = asyncio.get_running_loop().time()
        unseeded = types.SamplingParams(max_tokens=sampling_params.max_tokens, temperature=sampling_params.temperature)
        with self._log.computing():
            return super().sample(prompt, num_samples, unseeded)

    async def sample_async(
        self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
    ) -> types.SampleResponse:
        return await self.sample(prompt, num_samples, sampling_params)

    def result(self) -> Self:
        return self


class Training(SimulatedTrainingClient):
    """Simulated training client."""

    def __init__(self, of: SimulatedTrainingClient, log: Log) -> None:
        super().__init__(of._world, of._latency, of._sampler, of._weights)
        self._log = log
        self._sequences = self._teaching = 0

    def forward_backward(
        self, data: Sequence[types.Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Reply[types.ForwardBackwardOutput]:
        with self._log.computing():
            self._sequences += len(data)
            self._teaching += sum(bool(np.any(np.asarray(datum.loss_fn_inputs["advantages"].data))) for datum in data)
            return Reply(super().forward_backward(data, loss_fn, loss_fn_config))

    def optim_step(self, adam_params: types.AdamParams) -> Reply[types.OptimStepResponse]:
        answer = super().optim_step(adam_params)
        self._log.steps.append(TrainedStep(self._busy_until_s, self._sequences, self._teaching))
        self._sequences = self._teaching = 0
        return Reply(answer)

    def save_weights_and_get_sampling_client(self, record_stability_info: bool = False) -> SimulatedFuture[Sampling]:
        return SimulatedFuture(self._handed_over(super().save_weights_and_get_sampling_client()))

    def create_sampling_client(self, model_path: str, record_stability_info: bool = False) -> Sampling:
        return Sampling(self._sampler, self._log)

    async def forward_backward_async(
        self, data: Sequence[types.Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> Reply[types.ForwardBackwardOutput]:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    async def optim_step_async(self, adam_params: types.AdamParams) -> Reply[types.OptimStepResponse]:
        return self.optim_step(adam_params)

    async def save_weights_and_get_sampling_client_async(self) -> Sampling:
        return await self.save_weights_and_get_sampling_client()

    async def save_state_async(self, name: str, ttl_seconds: int | None = None) -> Reply[types.SaveWeightsResponse]:
        return Reply(self.save_state(name, ttl_seconds))

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None
    ) -> Reply[types.SaveWeightsForSamplerResponse]:
        return Reply(self.save_weights_for_sampler(name, ttl_seconds))

    def _enqueue[T](self, call: str, seconds: float, work: Callable[[], T]) -> SimulatedFuture[T]:
        def counted() -> T:
            with self._log.computing():
                return work()

        return super()._enqueue(call, seconds, counted)

    async def _handed_over(self, answer: SimulatedFuture[SimulatedSamplingClient]) -> Sampling:
        return Sampling(await answer, self._log)


class Client(SimulatedClient):
    """Simulated `tinker.ServiceClient`."""

    def __init__(self, world: World, latency: Latency, log: Log) -> None:
        super().__init__(world, latency)
        self._log = log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def create_lora_training_client(
        self, base_model: str, rank: int = 32, seed: int | None = None, **_: object
    ) -> SimulatedFuture[Training]:
        return SimulatedFuture(self._opened(super().create_lora_training_client(base_model, rank, seed)))

    async def create_lora_training_client_async(self, base_model: str, rank: int = 32, **_: object) -> Training:
        return await self.create_lora_training_client(base_model, rank)

    async def _opened(self, answer: SimulatedFuture[SimulatedTrainingClient]) -> Training:
        return Training(await answer, self._log)


class Tinker(SimulatedTinker):
    """The simulated service for rlkit."""

    def __init__(self, world: World, latency: Latency, log: Log) -> None:
        super().__init__(world=world, latency=latency, context_tokens=2**20, is_repeatable=False)
        self._client = Client(world, latency, log)
