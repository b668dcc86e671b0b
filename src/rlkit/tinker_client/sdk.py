"""The Tinker SDK behind rlkit's own protocols.

Invariant: no type, exception or warning of the SDK leaves this module and `sdk_types`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self

import tinker
from tinker import types

from rlkit._util.threads import in_thread
from rlkit.algorithms.losses import LocalLoss, Loss
from rlkit.algorithms.references import Score, Scores
from rlkit.config.schema.objective import LoraConfig, OptimizerConfig
from rlkit.cost.usage import Usage
from rlkit.errors import MissingError, RlkitError, ServiceError, UsageError
from rlkit.policy import Sampler
from rlkit.service import Gradient, Learner, Service
from rlkit.tinker_client.connector import ServiceAddress, Unreachable
from rlkit.tinker_client.local_loss import compute_loss
from rlkit.tinker_client.sdk_types import find_logprobs, model_input, to_completion, to_datum, to_scores
from rlkit.tinker_client.stored_checkpoint import StoredCheckpoint
from rlkit.types import Completion, Datum, Prompt, Sampling

_PAGE = 100  # number of checkpoints to request at once
CLOSING_S = 10.0  # time limit for closing the session; the SDK would retry for minutes


class TinkerService(Service):
    """A session of the Tinker SDK.

    Args:
        address: address of the service, by default that of the SDK.
        client: client to use instead of a new one.
    """

    def __init__(self, address: ServiceAddress | None = None, *, client: tinker.ServiceClient | None = None) -> None:
        self._address = address = address or ServiceAddress()
        self._client = client or tinker.ServiceClient(base_url=address.base_url, api_key=address.api_key)
        self._opening = False
        self._rest_client: tinker.RestClient | None = None
        self._usage = Usage()

    @property
    def usage(self) -> Usage:  # noqa: D102  inherited
        return self._usage

    @property
    def is_repeatable(self) -> bool:  # noqa: D102  inherited
        return self._address.embedded

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        status = "success" if kind is None else "errored" if issubclass(kind, Exception) else "interrupted"
        with suppress(tinker.TinkerError, TimeoutError):  # closing cannot change the result
            async with asyncio.timeout(CLOSING_S):
                if not self._opening:  # else there is no session to close, and the SDK is still connecting
                    # In a thread: the SDK acquires a lock that a call to a silent service can hold for ever.
                    await (await in_thread(self._client.close, status))
                if self._address.embedded and self._rest_client is not None:
                    holder = self._rest_client.holder  # its connections are global to the process
                    await holder.run_coroutine_threadsafe(holder.aclose())

    async def open_session(self) -> None:
        """Open the session now instead of at the first request.

        Raises:
            MissingError: no session opened within the connector's time, or the service rejected the key.
            ServiceError: the service failed, and there is no connector.
        """
        self._opening = True
        await self._connect(lambda: self._client.holder, "opening a session", failure="opens no session")
        self._opening = False

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

        activity = f"loading {checkpoint}" if checkpoint else f"starting a training session for {model}"
        return TinkerLearner(await self._create(create, activity), self._usage)

    async def sampler(self, *, model: str, checkpoint: str | None = None) -> TinkerSampler:  # noqa: D102  inherited
        base_model = model if checkpoint is None else None
        create = partial(self._client.create_sampling_client, model_path=checkpoint, base_model=base_model)
        activity = f"preparing to sample from {checkpoint or model}"
        return TinkerSampler(await self._create(create, activity), self._usage, version=0)

    async def scorer(self, *, model: str, checkpoint: str | None = None) -> Score:  # noqa: D102  inherited
        return (await self.sampler(model=model, checkpoint=checkpoint)).score

    async def _create[T](self, create: Callable[[], Awaitable[T]], activity: str) -> T:
        return await _await_answer(await self._call_in_thread(create, activity), activity)

    async def context_tokens(self, model: str) -> int | None:  # noqa: D102  inherited
        offered = await self._ask(lambda rest: rest.get_server_capabilities(), "asking for the service's models")
        return next((m.max_context_length for m in offered.supported_models if m.model_name == model), None)

    async def delete(self, path: str) -> None:  # noqa: D102  inherited
        await self._ask(lambda rest: rest.delete_checkpoint_from_tinker_path(path), f"deleting {path}")

    async def set_ttl(self, path: str, ttl_s: int | None) -> None:
        """Let a checkpoint expire an hour to ten years from now, or never (None)."""
        await self._ask(
            lambda rest: rest.set_checkpoint_ttl_from_tinker_path(path, ttl_s), f"changing when {path} expires"
        )

    async def list_checkpoints(self) -> Sequence[StoredCheckpoint]:
        """Return all checkpoints of the account, newest first."""
        activity, stored, offset = "asking for the checkpoints", dict[str, StoredCheckpoint](), 0
        while True:
            page = await self._ask(lambda rest, begin=offset: rest.list_user_checkpoints(_PAGE, begin), activity)
            for saved in page.checkpoints:  # a checkpoint saved meanwhile shifts others to the next page
                path, expires = saved.tinker_path, saved.expires_at
                expires_s = None if expires is None else expires.timestamp()
                stored[path] = StoredCheckpoint(
                    path, saved.checkpoint_type, saved.time.timestamp(), saved.size_bytes, expires_s
                )
            offset += len(page.checkpoints)  # a service may return fewer than requested
            if not page.checkpoints or (page.cursor is not None and offset >= page.cursor.total_count):
                return list(stored.values())

    async def model_of(self, path: str) -> str:  # noqa: D102  inherited
        info = await self._ask(lambda rest: rest.get_weights_info_by_tinker_path(path), f"asking for {path}")
        return info.base_model

    async def _ask[T](self, request: Callable[[tinker.RestClient], Awaitable[T]], activity: str) -> T:
        if self._rest_client is None:
            self._rest_client = await self._connect(
                lambda: tinker.RestClient(base_url=self._address.base_url, api_key=self._address.api_key), activity
            )
        return await _await_answer(request(self._rest_client), activity)

    async def _connect[T](self, make_client: Callable[[], T], activity: str, *, failure: str = "does not answer") -> T:
        """Make a client of the SDK, retrying with the connector."""
        if self._address.connector is None:
            return await self._call_in_thread(make_client, activity)

        async def attempt(_: float) -> T:
            try:
                return await self._call_in_thread(make_client, activity)
            except ServiceError as error:
                raise Unreachable(str(error)) from error

        warnings = list[str]()
        with capture_warnings(warnings.append):
            return await self._address.connector.retry(
                attempt, failure, hint=lambda: warnings[-1] if warnings else "no answer"
            )

    async def _call_in_thread[T](self, make_client: Callable[[], T], activity: str) -> T:
        """Make a client in a thread, because the SDK connects in the constructor."""
        try:
            return await in_thread(make_client)
        except tinker.TinkerError as error:
            raise translate_error(error, activity) from error


class TinkerLearner(Learner):
    """A training client of the SDK."""

    def __init__(self, client: tinker.TrainingClient, usage: Usage) -> None:
        self._client = client
        self._usage = usage

    def gradient(self, data: Sequence[Datum], loss: Loss) -> Awaitable[Gradient]:  # noqa: D102  inherited
        wire = [to_datum(datum, loss) for datum in data]
        if isinstance(loss, LocalLoss):
            future = self._client.forward_backward_custom(wire, lambda _, logprobs: compute_loss(loss, data, logprobs))
        else:
            name, settings = loss.service_loss()
            future = self._client.forward_backward(wire, name, settings or None)  # pyright: ignore[reportArgumentType]  one of the SDK's loss names
        return _start(self._await_gradient(future, data, passes=loss.passes))

    def forward(self, data: Sequence[Datum], loss: Loss) -> Awaitable[Gradient]:  # noqa: D102  inherited
        name, settings = loss.service_loss()
        future = self._client.forward([to_datum(datum, loss) for datum in data], name, settings or None)  # pyright: ignore[reportArgumentType]  one of the SDK's loss names
        return _start(self._await_gradient(future, data, passes=1))

    def step(  # noqa: D102  inherited
        self, optimizer: OptimizerConfig, *, learning_rate: float
    ) -> Awaitable[Mapping[str, float]]:
        settings = types.AdamParams(
            learning_rate=learning_rate,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            grad_clip_norm=optimizer.grad_clip_norm,
        )
        return _start(_await_step(self._client.optim_step(settings)))

    def sampler(self, version: int) -> Awaitable[Sampler]:  # noqa: D102  inherited
        return _start(self._await_sampler(self._client.save_weights_and_get_sampling_client(), version))

    def save(self, name: str, *, ttl_s: int | None) -> Awaitable[tuple[str, str]]:  # noqa: D102  inherited
        state = self._client.save_state(name, ttl_seconds=ttl_s)
        sampler = self._client.save_weights_for_sampler(name, ttl_seconds=ttl_s)
        return _start(_await_save(state, sampler, f"saving the checkpoint {name}"))

    async def _await_gradient(
        self, future: Awaitable[types.ForwardBackwardOutput], data: Sequence[Datum], *, passes: int
    ) -> Gradient:
        computed = await _await_answer(future, "computing a gradient")
        self._usage.add_training(passes * sum(len(datum.targets) for datum in data))
        logprobs = [find_logprobs(output) for output in computed.loss_fn_outputs]
        return Gradient(logprobs, computed.metrics)

    async def _await_sampler(self, future: Awaitable[tinker.SamplingClient], version: int) -> Sampler:
        client = await _await_answer(future, "handing the weights to the sampler")
        return TinkerSampler(client, self._usage, version=version)


async def _await_step(future: Awaitable[types.OptimStepResponse]) -> Mapping[str, float]:
    return (await _await_answer(future, "taking an optimiser step")).metrics or {}


async def _await_save(
    state: Awaitable[types.SaveWeightsResponse], sampler: Awaitable[types.SaveWeightsForSamplerResponse], activity: str
) -> tuple[str, str]:
    return (await _await_answer(state, activity)).path, (await _await_answer(sampler, activity)).path


def _start[T](answer: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """Start waiting for an answer; an error that is never awaited is dropped."""
    task = asyncio.ensure_future(answer)
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    return task


class TinkerSampler(Sampler):
    """A sampling client of the SDK, for one version of the weights."""

    def __init__(self, client: tinker.SamplingClient, usage: Usage, *, version: int) -> None:
        self._client = client
        self._usage = usage
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
        response = await _await_answer(future, "sampling")
        completions = [to_completion(sequence) for sequence in response.sequences]
        self._usage.add_sampling(
            prompt=len(prompt),
            cached=response.prompt_cache_hit_tokens,
            completions=[len(completion.tokens) for completion in completions],
        )
        return completions

    async def score(self, prompt: Prompt, last: int, top: int) -> Scores:
        """Score the last tokens of a prompt, as the function that `Service.scorer` returns."""
        future = self._client.sample(
            model_input(prompt),
            1,
            types.SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            topk_prompt_logprobs=top,
            prompt_logprobs_last_n=last,
        )
        answer = await _await_answer(future, "asking for log-probabilities")
        self._usage.add_sampling(prompt=len(prompt), cached=0, completions=[1])
        return to_scores(answer, count=len(prompt), top=top).take(slice(-last, None))


async def _await_answer[T](future: Awaitable[T], activity: str) -> T:
    this = asyncio.current_task()
    try:
        return await future
    except tinker.TinkerError as error:
        raise translate_error(error, activity) from error
    except asyncio.CancelledError:
        if this is not None and this.cancelling():
            raise
        raise ServiceError(f"{activity}: the SDK cancelled the request") from None
    except (RlkitError, GeneratorExit):
        raise
    except Exception as error:  # a response that the SDK cannot parse, or a fault of the SDK, counts as no answer
        raise ServiceError(f"{activity}: {type(error).__name__}: {_first_line(error)}") from error


def translate_error(error: Exception, activity: str) -> RlkitError:
    """Return the rlkit error for an exception that the SDK raised after its retries."""
    headers: Mapping[str, str] = getattr(getattr(error, "response", None), "headers", {})
    request_id = getattr(error, "request_id", None) or headers.get("x-request-id")
    match error:
        case _ if type(error) is tinker.TinkerError and "api_key" in str(error):
            return MissingError(f"{activity}: {_first_line(error)}; check TINKER_API_KEY")
        case tinker.AuthenticationError() | tinker.PermissionDeniedError():
            return MissingError(f"{activity}: the Tinker service rejected the key; check TINKER_API_KEY")
        case tinker.RequestFailedError() if str(getattr(error, "category", "")).lower().endswith("user"):
            return UsageError(f"{activity}: {_first_line(error)}")
        case tinker.BadRequestError() | tinker.UnprocessableEntityError() | tinker.NotFoundError():
            return UsageError(f"{activity}: the Tinker service rejected the request: {_first_line(error)}")
        case _:
            return ServiceError(f"{activity}: {type(error).__name__}: {_first_line(error)}", request_id=request_id)


def _first_line(error: Exception) -> str:
    first = (str(getattr(error, "message", "") or error).strip().splitlines() or [repr(error)])[0]
    return first.split(" for self.request_id=")[0]  # drop the SDK's internal details


@contextmanager
def capture_warnings(receive: Callable[[str], None]) -> Generator[None]:
    """Pass the first line of each warning of the SDK to `receive`, such as that a queue is paused."""
    logger, handler = logging.getLogger("tinker"), logging.Handler(logging.WARNING)
    handler.emit = lambda record: receive(record.getMessage().splitlines()[0])
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
