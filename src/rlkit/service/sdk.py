"""The Tinker SDK behind rlkit's own small protocols.

Invariant: no type, exception or warning of the SDK leaves this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Self

import numpy as np
import tinker
from tinker import types

from rlkit.errors import MissingError, RlkitError, ServiceError, UsageError
from rlkit.losses import Loss
from rlkit.policy import Sampler
from rlkit.service import Learner, Service, Update
from rlkit.types import Completion, Datum, Prompt, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.config.schema import LoraConfig, OptimizerConfig


CLOSING_S = 10.0
"""How long to wait for the service when leaving it; the SDK itself would retry for minutes."""


class TinkerService(Service):
    """A session of the Tinker SDK.

    Args:
        base_url: None for the SDK's own default.
        api_key: None for the SDK's own look-up (TINKER_API_KEY and the like).
    """

    def __init__(self, *, base_url: str | None = None, api_key: str | None = None) -> None:
        self._base_url = base_url
        self._api_key = api_key
        self._client = tinker.ServiceClient(base_url=base_url, api_key=api_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        status = "success" if kind is None else "errored" if issubclass(kind, Exception) else "interrupted"
        with suppress(tinker.TinkerError, TimeoutError):  # the work is done or lost; leaving changes neither
            async with asyncio.timeout(CLOSING_S):
                await self._client.close(status)

    async def learner(  # noqa: D102  inherited
        self, *, model: str, lora: LoraConfig, seed: int, checkpoint: str | None = None
    ) -> Learner:
        def create() -> Awaitable[tinker.TrainingClient]:
            if checkpoint is not None:
                return self._client.create_training_client_from_state_with_optimizer(checkpoint)
            return self._client.create_lora_training_client(
                model,
                rank=lora.rank,
                seed=seed,
                train_mlp=lora.train_mlp,
                train_attn=lora.train_attn,
                train_unembed=lora.train_unembed,
            )

        what = f"loading {checkpoint}" if checkpoint else f"starting a training session for {model}"
        return TinkerLearner(await _created(create, what))

    async def sampler(self, *, model: str, checkpoint: str | None = None) -> Sampler:  # noqa: D102  inherited
        def create() -> Awaitable[tinker.SamplingClient]:
            if checkpoint is not None:
                return self._client.create_sampling_client(model_path=checkpoint)
            return self._client.create_sampling_client(base_model=model)

        return TinkerSampler(await _created(create, f"preparing to sample from {checkpoint or model}"), version=0)

    async def context_tokens(self, model: str) -> int | None:  # noqa: D102  inherited
        what = "asking for the service's models"
        client = await _opened(lambda: tinker.RestClient(base_url=self._base_url, api_key=self._api_key), what)
        try:
            offered = await _answered(client.get_server_capabilities(), what)
        finally:
            await client.holder.run_coroutine_threadsafe(client.holder.aclose())
        return next((m.max_context_length for m in offered.supported_models if m.model_name == model), None)


class TinkerLearner(Learner):
    """A training client of the SDK."""

    def __init__(self, client: tinker.TrainingClient) -> None:
        self._client = client
        self._version = 0

    @property
    def version(self) -> int:  # noqa: D102  inherited
        return self._version

    async def update(self, data: Sequence[Datum], loss: Loss, optimizer: OptimizerConfig) -> Update:  # noqa: D102
        gradient = self._gradient(data, loss)
        step = self._client.optim_step(
            types.AdamParams(
                learning_rate=optimizer.learning_rate,
                beta1=optimizer.beta1,
                beta2=optimizer.beta2,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                grad_clip_norm=optimizer.grad_clip_norm,
            )
        )
        computed = await _answered(gradient, "computing a gradient")
        stepped = await _answered(step, "taking an optimiser step")
        self._version += 1
        logprobs = [np.asarray(output["logprobs"].to_numpy(), np.float32) for output in computed.loss_fn_outputs]
        return Update(logprobs, {**computed.metrics, **(stepped.metrics or {})})

    def _gradient(self, data: Sequence[Datum], loss: Loss) -> Awaitable[types.ForwardBackwardOutput]:
        wire = [_datum(datum) for datum in data]
        function = loss.function
        if function is None:
            return self._client.forward_backward(wire, loss.name, dict(loss.settings) or None)  # pyright: ignore[reportArgumentType]  the configuration allows only the SDK's own names

        def custom(_: list[types.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
            try:
                value, metrics = function(data, logprobs)
                if value.numel() != 1 or not value.requires_grad:
                    raise ValueError("the loss must be one number that depends on the log-probabilities")
            except Exception as error:
                raise UsageError(f"loss.function: {type(error).__name__}: {error}") from error
            return value, dict(metrics)

        return self._client.forward_backward_custom(wire, custom)

    async def sampler(self) -> Sampler:  # noqa: D102  inherited
        client = await _answered(
            self._client.save_weights_and_get_sampling_client(), "handing the weights to the sampler"
        )
        return TinkerSampler(client, version=self._version)

    async def save(self, name: str, *, ttl_s: int | None) -> tuple[str, str]:  # noqa: D102  inherited
        state = self._client.save_state(name, ttl_seconds=ttl_s)
        sampler = self._client.save_weights_for_sampler(name, ttl_seconds=ttl_s)
        what = f"saving the checkpoint {name}"
        return (await _answered(state, what)).path, (await _answered(sampler, what)).path


class TinkerSampler(Sampler):
    """A sampling client of the SDK, which is bound to the weights that it was made from."""

    def __init__(self, client: tinker.SamplingClient, *, version: int) -> None:
        self._client = client
        self._version = version

    @property
    def version(self) -> int:  # noqa: D102  inherited
        return self._version

    async def sample(  # noqa: D102  inherited
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        future = self._client.sample(
            model_input(prompt),
            num_samples,
            types.SamplingParams(
                max_tokens=sampling.max_tokens,
                seed=seed,
                stop=None if sampling.stop is None else list(sampling.stop),  # pyright: ignore[reportArgumentType]  one kind in, one kind out
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
            ),
        )
        response = await _answered(future, "sampling")
        return [
            Completion(
                tokens=np.asarray(sequence.tokens, np.int32),
                logprobs=np.asarray(sequence.logprobs if sequence.logprobs is not None else [], np.float32),
                stop=sequence.stop_reason,
            )
            for sequence in response.sequences
        ]


def model_input(prompt: Prompt) -> types.ModelInput:
    """A prompt as the SDK's chunks: runs of tokens, and the images between them."""
    chunks, start = list[types.ModelInputChunk](), 0
    for image in prompt.images:
        if image.start > start:
            chunks.append(types.EncodedTextChunk(tokens=prompt.tokens[start : image.start].tolist()))
        chunks.append(types.ImageChunk(data=image.data, format=image.format, expected_tokens=image.length))
        start = image.start + image.length
    if start < len(prompt):
        chunks.append(types.EncodedTextChunk(tokens=prompt.tokens[start:].tolist()))
    return types.ModelInput(chunks=chunks)


def _datum(datum: Datum) -> types.Datum:
    inputs = {
        "target_tokens": types.TensorData.from_numpy(datum.targets.astype(np.int64)),
        "logprobs": types.TensorData.from_numpy(datum.logprobs),
        "advantages": types.TensorData.from_numpy(datum.advantages),
    }
    return types.Datum(model_input=model_input(datum.prompt), loss_fn_inputs=inputs)


async def _created[T](create: Callable[[], Awaitable[T]], what: str) -> T:
    return await _answered(await _opened(create, what), what)


async def _opened[T](open_: Callable[[], T], what: str) -> T:
    """Call in a thread: the SDK connects there and then."""
    try:
        return await asyncio.to_thread(open_)
    except tinker.TinkerError as error:
        raise _translated(error, what) from error


async def _answered[T](future: Awaitable[T], what: str) -> T:
    try:
        return await future
    except tinker.TinkerError as error:
        raise _translated(error, what) from error


def _translated(error: tinker.TinkerError, what: str) -> RlkitError:
    """The SDK's exception as rlkit's; the SDK has already retried what can be retried."""
    headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", {})
    request_id = getattr(error, "request_id", None) or headers.get("x-request-id")
    match error:
        case _ if type(error) is tinker.TinkerError and "api_key" in str(error):
            return MissingError(f"{what}: {_plain(error)}; check TINKER_API_KEY")
        case tinker.AuthenticationError() | tinker.PermissionDeniedError():
            return MissingError(f"{what}: the Tinker service refused the key; check TINKER_API_KEY")
        case tinker.RequestFailedError() if str(getattr(error, "category", "")).lower().endswith("user"):
            return UsageError(f"{what}: {_plain(error)}")
        case tinker.BadRequestError() | tinker.UnprocessableEntityError() | tinker.NotFoundError():
            return UsageError(f"{what}: the Tinker service refused the request: {_plain(error)}")
        case _:
            return ServiceError(f"{what}: {type(error).__name__}: {_plain(error)}", request_id=request_id)


def _plain(error: Exception) -> str:
    first = str(getattr(error, "message", "") or error).strip().splitlines()[0]
    return first.split(" for self.request_id=")[0]  # the SDK's own words for what follows are of no use to a user
