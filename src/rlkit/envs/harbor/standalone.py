"""`TinkerTerminus2`: agent to evaluate a model or checkpoint of a Tinker service with Harbor's command line.

    harbor run --agent rlkit.envs.harbor.standalone:TinkerTerminus2 --model Qwen/Qwen3-8B \\
        --agent-kwarg checkpoint_path=tinker://…/sampler_weights/… --path tasks

Invariant: all trials of a process with the same weights share one connection and one client, from the first trial to
the end of the event loop. A failure of the service is an error of the trial, never a reward of 0.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast, override
from weakref import WeakKeyDictionary

from harbor.llms.base import BaseLLM
from pydantic import Field

from rlkit._util.seeds import derive_seed
from rlkit._util.threads import in_thread
from rlkit.chat.format import ChatFormat
from rlkit.chat.renderers import chat_format
from rlkit.config.schema import ServiceConfig
from rlkit.envs.harbor.agents.llm import PolicyLLM
from rlkit.envs.harbor.agents.terminus import PolicyOptions, PolicyTerminus2
from rlkit.errors import UsageError
from rlkit.policy import Limits, Sampler
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.tinker_client.connect import choose_service, connect
from rlkit.tokenizers.load import load_tokenizer
from rlkit.types import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harbor.environments.base import BaseEnvironment

MAX_TOKENS = 4096
"""Default limit of a reply, enough for commands and some thinking before them."""


class TinkerOptions(PolicyOptions):
    """The options of a policy in Terminus2, and the source of its model."""

    checkpoint_path: str | None = Field(
        default=None, description="tinker://…/sampler_weights/… path; by default the base model of --model."
    )
    base_url: str | None = Field(default=None, description="Address of the service; TINKER_BASE_URL by default.")
    renderer: str | None = Field(
        default=None, description="Chat format; by default the format recommended for the model."
    )
    context_tokens: int | None = Field(default=None, ge=2, description="Context limit, if below the service's.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    seed: int = Field(default=0, ge=0)
    timeout_s: float = Field(default=600.0, gt=0, description="Maximum seconds without an answer of the service.")


class TinkerTerminus2(PolicyTerminus2):
    """Terminus2 with a model of a Tinker service; options are those of `PolicyTerminus2` and `TinkerOptions`.

    The service is chosen as in a run: `base_url`, TINKER_BASE_URL, a credential, otherwise the embedded engine.
    """

    options_model = TinkerOptions
    raised_reasons = frozenset({"service_error", "agent_error"})

    def __init__(self, logs_dir: Path, model_name: str | None = None, **kwargs: object) -> None:
        self._requested_model = model_name
        super().__init__(logs_dir, model_name, **kwargs)

    @override
    def _init_llm(self, *args: object, **kwargs: object) -> BaseLLM:
        if self._requested_model is None and cast("TinkerOptions", self.options).checkpoint_path is None:
            raise UsageError("give a model (--model), or a checkpoint (--agent-kwarg checkpoint_path=tinker://…)")
        return cast("BaseLLM", None)  # `setup` connects, because it is asynchronous

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        options = cast("TinkerOptions", self.options)
        source = _Source(self._requested_model, options.checkpoint_path, options.base_url, options.renderer)
        connection = await _get_connection(source, timeout_s=options.timeout_s, note=self.logger.info)
        limits = [tokens for tokens in (connection.context_tokens, options.context_tokens) if tokens is not None]
        sampling = Sampling(
            max_tokens=options.max_tokens or MAX_TOKENS,
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
        )
        policy = RecordingPolicy(
            sampler=lambda: connection.sampler,
            chat=connection.chat,
            sampling=sampling,
            seed=lambda turn: derive_seed(options.seed, "harbor", self.session_id or "", turn),
            limits=Limits(context_tokens=min(limits, default=None)),
        )
        self._model_name = connection.model
        self._llm = self._policy_llm = PolicyLLM(
            policy, model_name=connection.model, reserve_tokens=options.reserve_tokens
        )
        await super().setup(environment)


@dataclass(frozen=True, slots=True)
class _Source:
    """Weights, their service, and the chat format."""

    model: str | None
    checkpoint: str | None
    base_url: str | None
    renderer: str | None


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    model: str
    sampler: Sampler
    chat: ChatFormat
    context_tokens: int | None


type _PendingConnection = tuple[asyncio.Future[_Connection], asyncio.Task[None]]
"""An open or pending connection, and the task that keeps it open."""

_CONNECTIONS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Source, _PendingConnection]] = WeakKeyDictionary()


async def disconnect() -> None:
    """Close the connections of this event loop; the end of the loop also closes them."""
    tasks = [task for _, task in _CONNECTIONS.pop(asyncio.get_running_loop(), {}).values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _get_connection(source: _Source, *, timeout_s: float, note: Callable[[str], None]) -> _Connection:
    loop = asyncio.get_running_loop()
    connections = _CONNECTIONS.setdefault(loop, {})
    if source not in connections or connections[source][1].done():
        ready = loop.create_future()
        connections[source] = ready, asyncio.create_task(_keep_connected(ready, source, timeout_s=timeout_s, note=note))
    return await asyncio.shield(connections[source][0])  # a cancelled trial must not cancel the others


async def _keep_connected(
    ready: asyncio.Future[_Connection], source: _Source, *, timeout_s: float, note: Callable[[str], None]
) -> None:
    """Connect, and keep the connection open until this task or its event loop ends."""
    config = ServiceConfig(base_url=source.base_url, timeout_s=timeout_s)
    choice, watch = choose_service(config), ServiceWatch(note, timeout_s)
    try:
        async with connect(config, choice=choice, note=note) as service:
            model, checkpoint = source.model, source.checkpoint
            if model is None:
                assert checkpoint is not None
                model = await service.model_of(checkpoint)
            tokenizer = await in_thread(lambda: load_tokenizer(model, with_weights=choice.kind == "engine", note=note))
            chat = await in_thread(lambda: chat_format(model, tokenizer, renderer=source.renderer))
            sampler = await watch.call(
                lambda: service.sampler(model=model, checkpoint=checkpoint), "preparing to sample", retry=True
            )
            context = await watch.call(lambda: service.context_tokens(model), "asking for the context", retry=True)
            ready.set_result(_Connection(model, PatientSampler(sampler, watch, 0), chat, context))
            await asyncio.Event().wait()
    except Exception as error:
        if ready.done():
            raise
        ready.set_exception(error)
    finally:
        ready.cancel()  # if still pending, so that no trial waits forever
