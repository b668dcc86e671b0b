"""Simulated Tinker service: the SDK's clients in this process, without a model, on any event loop.

Invariant: the seed and the requests determine the responses; the latencies determine their times. Weights are a hash of
all training data in order: runs with equal weights trained on the same data in the same order.

With `run_virtual`, hours of training take seconds::

    service = SimulatedTinker(latency=Latency(token_s=0.02))
    result = run_virtual(rlkit.RLTrainer(config, envs=envs, service=service).train())
    print(service.world.calls["sample"])
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, override

import numpy as np
import tinker
from tinker import types
from tinker.types.topk_logprobs import TopkLogprobs
from torch import Tensor

from rlkit.errors import ServiceError, UsageError
from rlkit.testing.futures import SimulatedFuture, make_not_found_error, resolve_later
from rlkit.testing.world import Latency, World, digest
from rlkit.tinker_client.sdk import TinkerService, translate_error
from rlkit.tinker_client.stored_checkpoint import StoredCheckpoint

type _Floats = np.ndarray[Any, np.dtype[np.float32]]
type CustomLoss = Callable[[list[types.Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]

_LETTERS = (97, 123)


class SimulatedTinker(TinkerService):
    """Simulated service for `RLTrainer(service=…)`.

    Args:
        world: state that outlives the service; a new world by default.
        slots: maximum concurrent samples; further samples wait.
        context_tokens: context size of the model.
        is_repeatable: the value of the service's property, which says that equal requests get equal responses; False
            for the hosted service.
    """

    def __init__(
        self,
        *,
        latency: Latency | None = None,
        world: World | None = None,
        slots: int | None = None,
        context_tokens: int = 32_768,
        is_repeatable: bool = True,
    ) -> None:
        self.world = world or World()
        self._is_repeatable = is_repeatable
        self._context_tokens = context_tokens
        super().__init__(client=SimulatedClient(self.world, latency or Latency(), slots=slots))  # type: ignore[arg-type]  a stand-in

    @property
    @override
    def is_repeatable(self) -> bool:
        return self._is_repeatable

    @override
    async def __aexit__(self, *error: object) -> None:
        pass

    @override
    async def _call_in_thread[T](self, make_client: Callable[[], T], activity: str) -> T:
        try:
            return make_client()
        except tinker.TinkerError as error:
            raise translate_error(error, activity) from error

    @override
    async def delete(self, path: str) -> None:
        if (kind := self.world.next_fault("delete", asyncio.get_running_loop().time())) is not None:
            raise ServiceError(f"deleting {path}: {kind}")
        if self.world.checkpoints.pop(path, None) is None:
            raise UsageError(f"deleting {path}: there is no such checkpoint")

    @override
    async def list_checkpoints(self) -> Sequence[StoredCheckpoint]:
        return [StoredCheckpoint(path, "training", 0.0) for path in reversed(self.world.checkpoints)]

    @override
    async def set_ttl(self, path: str, ttl_s: int | None) -> None:
        if path not in self.world.checkpoints:
            raise UsageError(f"changing when {path} expires: there is no such checkpoint")

    @override
    async def model_of(self, path: str) -> str:
        if path not in self.world.checkpoints and "/sampler_weights/" not in path:  # these are not remembered
            raise UsageError(f"requesting {path}: there is no such checkpoint")
        return self.world.model

    @override
    async def context_tokens(self, model: str) -> int | None:
        return self._context_tokens


class SimulatedClient:
    """Substitute for `tinker.ServiceClient`."""

    def __init__(self, world: World, latency: Latency, *, slots: int | None = None) -> None:
        self._world = world
        self._latency = latency
        self._sampler = SimulatedSamplingClient(world, latency, slots)

    def create_lora_training_client(
        self, base_model: str, rank: int = 32, seed: int | None = None, **_: object
    ) -> SimulatedFuture[SimulatedTrainingClient]:
        """Make an adapter whose weights depend on the model and the seed."""
        self._world.model = base_model
        return self._load_client(digest(base_model, rank, seed))

    def create_training_client_from_state_with_optimizer(self, path: str) -> SimulatedFuture[SimulatedTrainingClient]:
        """Load the weights of a checkpoint."""
        if path not in self._world.checkpoints:
            raise make_not_found_error(f"there is no checkpoint {path}")
        return self._load_client(self._world.checkpoints[path])

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SimulatedFuture[SimulatedSamplingClient]:
        """Make a sampler of a checkpoint or a base model."""
        return SimulatedFuture(asyncio.sleep(0, self._sampler))

    def _load_client(self, weights: int) -> SimulatedFuture[SimulatedTrainingClient]:
        client = SimulatedTrainingClient(self._world, self._latency, self._sampler, weights)
        return resolve_later(self._world, "load", self._latency.load_s, lambda: client)


class SimulatedTrainingClient:
    """Substitute for `tinker.TrainingClient`, which runs requests one by one, in order."""

    def __init__(self, world: World, latency: Latency, sampler: SimulatedSamplingClient, weights: int) -> None:
        self._world = world
        self._latency = latency
        self._sampler = sampler
        self._weights = weights
        self._gradient: list[int] = []
        self._busy_until_s = 0.0

    def forward(
        self, data: Sequence[types.Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> SimulatedFuture[types.ForwardBackwardOutput]:
        """Compute log-probabilities, without a gradient."""
        return self._differentiate(data, lambda logprobs: {}, passes=1, adds_gradient=False)

    def forward_backward(
        self, data: Sequence[types.Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> SimulatedFuture[types.ForwardBackwardOutput]:
        """Add to the gradient; the loss is −Σ advantage · log-probability."""

        def loss(logprobs: Sequence[_Floats]) -> Mapping[str, float]:
            weights = "weights" if loss_fn == "cross_entropy" else "advantages"
            advantages = [np.asarray(datum.loss_fn_inputs[weights].data, np.float64) for datum in data]
            losses = [-float(a @ logp.ravel()) for a, logp in zip(advantages, logprobs, strict=True)]
            return {"loss:sum": math.fsum(losses)}

        return self._differentiate(data, loss, passes=1)

    def forward_backward_custom(
        self, data: Sequence[types.Datum], loss_fn: CustomLoss
    ) -> SimulatedFuture[types.ForwardBackwardOutput]:
        """Add to the gradient of a loss that is computed on this machine."""
        import torch

        def loss(logprobs: Sequence[_Floats]) -> Mapping[str, float]:
            value, metrics = loss_fn(list(data), [torch.tensor(logp, requires_grad=True) for logp in logprobs])
            value.backward()
            return metrics

        return self._differentiate(data, loss, passes=2)

    def _differentiate(
        self,
        data: Sequence[types.Datum],
        loss: Callable[[Sequence[_Floats]], Mapping[str, float]],
        *,
        passes: int,
        adds_gradient: bool = True,
    ) -> SimulatedFuture[types.ForwardBackwardOutput]:
        """Compute log-probabilities with the latency of `passes` passes; add the data to the gradient."""
        digests = [_datum_digest(datum) for datum in data]
        tokens = passes * sum(datum.model_input.length for datum in data)
        self._world.calls["trained_tokens"] += tokens

        def compute() -> types.ForwardBackwardOutput:
            shapes = [datum.loss_fn_inputs["target_tokens"].to_numpy().shape for datum in data]
            values = [-1 - digest(self._weights, datum_digest) / 2**64 for datum_digest in digests]
            logprobs = [np.full(shape, value, np.float32) for shape, value in zip(shapes, values, strict=True)]
            metrics = dict(loss(logprobs))
            if adds_gradient:
                self._gradient += digests
            outputs: Any = [{"logprobs": types.TensorData.from_numpy(logp)} for logp in logprobs]
            return types.ForwardBackwardOutput("ArrayRecord", outputs, metrics)

        seconds = passes * self._latency.gradient_s + tokens / self._latency.trained_tokens_per_s
        return self._enqueue("gradient", seconds, compute)

    def optim_step(self, adam_params: types.AdamParams) -> SimulatedFuture[types.OptimStepResponse]:
        """Update the weights with the accumulated gradient."""

        def step() -> types.OptimStepResponse:
            self._weights = digest(self._weights, adam_params.learning_rate, *self._gradient)
            self._world.step_digests.append(tuple(self._gradient))
            self._gradient = []
            return types.OptimStepResponse(metrics={"weights": self._weights / 2**64})

        return self._enqueue("step", self._latency.step_s, step)

    def save_weights_and_get_sampling_client(self) -> SimulatedFuture[SimulatedSamplingClient]:
        """Make a sampler of the weights, after all earlier requests."""
        return self._enqueue("save", self._latency.save_s, lambda: self._sampler)

    def save_state(self, name: str, ttl_seconds: int | None = None) -> SimulatedFuture[types.SaveWeightsResponse]:
        """Save a checkpoint."""

        def save() -> types.SaveWeightsResponse:
            number = self._world.calls["save"]  # increases, so that the path of a deleted checkpoint is not reused
            path = f"tinker://simulated-{number}:train:0/weights/{name}"
            self._world.checkpoints[path] = self._weights
            return types.SaveWeightsResponse(path=path)

        return self._enqueue("save", self._latency.save_s, save)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None
    ) -> SimulatedFuture[types.SaveWeightsForSamplerResponse]:
        """Save a checkpoint for sampling."""
        path = f"tinker://simulated:train:0/sampler_weights/{name}"
        return self._enqueue("save", self._latency.save_s, lambda: types.SaveWeightsForSamplerResponse(path=path))

    def _enqueue[T](self, call: str, seconds: float, work: Callable[[], T]) -> SimulatedFuture[T]:
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._busy_until_s)
        tick_s = self._latency.clock_s
        if tick_s and self._busy_until_s <= now_s:
            start_s = math.ceil(now_s / tick_s) * tick_s
        self._busy_until_s = start_s + seconds
        return resolve_later(self._world, call, self._busy_until_s - now_s, work)


class SimulatedSamplingClient:
    """Substitute for `tinker.SamplingClient`, with a limit of concurrent samples; it samples from all weights alike."""

    def __init__(self, world: World, latency: Latency, slots: int | None) -> None:
        self._world = world
        self._latency = latency
        self._slots = asyncio.Semaphore(sys.maxsize if slots is None else slots)
        self._turn = asyncio.Lock()

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> SimulatedFuture[types.SampleResponse]:
        """Sample lower-case letters, determined by prompt, seed and index; `Latency` determines their number.

        A request for log-probabilities of the prompt gets them, and no samples.
        """
        if include_prompt_logprobs:
            return self._score(prompt, topk_prompt_logprobs, prompt_logprobs_last_n or prompt.length)
        key, seed, world = _encode_prompt(prompt), sampling_params.seed, self._world
        world.calls["samples"] += num_samples
        world.calls["prefill_tokens"] += prompt.length
        draws = [
            digest(world.seed, key, seed + index if seed is not None else f"#{world.count_repeat(key)}")
            for index in range(num_samples)
        ]
        samples = [(draw, *self._draw_sequence(draw, sampling_params)) for draw in draws]
        world.calls["sampled_tokens"] += sum(len(tokens) for _, tokens, _ in samples)
        seconds = max(self._compute_duration(draw, len(tokens)) for draw, tokens, _ in samples)
        response = [
            types.SampledSequence(
                stop_reason="length" if cut else "stop",
                sequence_id=f"{draw}",
                tokens_np=tokens,
                logprobs_np=-np.random.default_rng(draw).exponential(1, len(tokens)).astype(np.float32),
            )
            for draw, tokens, cut in samples
        ]
        return SimulatedFuture(self._respond(num_samples, seconds, types.SampleResponse(response)))

    def _score(self, prompt: types.ModelInput, top: int, last: int) -> SimulatedFuture[types.SampleResponse]:
        """Return log-probabilities of the last tokens, determined by the prompt; NaN for the other tokens."""
        rng = np.random.default_rng(digest(self._world.seed, "score", _encode_prompt(prompt)))
        logprobs = -rng.exponential(1, (prompt.length, 1 + top)).astype(np.float32)
        logprobs[: prompt.length - min(last, prompt.length - 1), 0] = np.nan
        tops = TopkLogprobs(rng.integers(*_LETTERS, (prompt.length, top), np.int32), logprobs[:, 1:]) if top else None
        response = types.SampleResponse([], prompt_logprobs_np=logprobs[:, 0], topk_prompt_logprobs_np=tops)
        return resolve_later(self._world, "score", self._latency.first_s, lambda: response)

    async def _respond(self, count: int, seconds: float, response: types.SampleResponse) -> types.SampleResponse:
        async with AsyncExitStack() as exits:
            async with self._turn:  # a request gets all its slots before the next one gets any
                for _ in range(count):
                    await exits.enter_async_context(self._slots)
            self._world.count_samples(count)
            exits.callback(self._world.count_samples, -count)
            return await resolve_later(self._world, "sample", seconds, lambda: response)

    def _draw_sequence(self, draw: int, params: types.SamplingParams) -> tuple[np.ndarray[Any, Any], bool]:
        rng = np.random.default_rng(draw)
        mu = math.log(self._latency.mean_tokens) - self._latency.sigma**2 / 2
        length = max(1, round(float(rng.lognormal(mu, self._latency.sigma))))
        count = min(length, params.max_tokens or length)
        return rng.integers(*_LETTERS, count).astype(np.int32), count < length

    def _compute_duration(self, draw: int, tokens: int) -> float:
        slow = self._world.draw_uniform("slow", draw) < self._latency.slow_share
        return (self._latency.first_s + tokens * self._latency.token_s) * (self._latency.slow_factor if slow else 1)


def _datum_digest(datum: types.Datum) -> int:
    inputs = datum.loss_fn_inputs
    arrays = (inputs[name].data for name in ("target_tokens", "logprobs", "advantages", "weights") if name in inputs)
    images = b"".join(chunk.data for chunk in datum.model_input.chunks if isinstance(chunk, types.ImageChunk))
    return digest(*(np.asarray(values, np.float64).tobytes() for values in arrays), *([images] if images else []))


def _encode_prompt(prompt: types.ModelInput) -> bytes:
    """Return the tokens and images of a prompt as bytes."""
    parts = list[bytes]()
    for chunk in prompt.chunks:
        match chunk:
            case types.EncodedTextChunk():
                parts.append(np.asarray(chunk.tokens, np.int32).tobytes())
            case types.ImageChunk():
                parts.append(chunk.data)
            case _:
                raise ValueError(f"the simulated service supports text and images, not {type(chunk).__name__}")
    return b"".join(parts)
