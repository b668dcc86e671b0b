"""`TinkerTerminus2`: agent to evaluate a model or checkpoint of a Tinker service with Harbor's command line.

    harbor run --agent rlkit.envs.harbor.standalone:TinkerTerminus2 --model Qwen/Qwen3-8B \\
        --agent-kwarg checkpoint_path=tinker://…/sampler_weights/… --path tasks

Invariant: all trials of a process with the same weights share one connection and one client, from the first trial to
the end of the event loop. A failure of the service is an error of the trial, never a reward of 0.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import cast, override

from harbor.environments.base import BaseEnvironment
from harbor.llms.base import BaseLLM
from pydantic import Field

from rlkit._util.seeds import derive_seed
from rlkit.config.schema import ServiceConfig
from rlkit.envs.harbor.agents.terminus import PolicyOptions, PolicyTerminus2
from rlkit.errors import UsageError
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.serving.model import ServedModel, open_model
from rlkit.tinker_client.connect import choose_service, connect
from rlkit.types import Sampling
from rlkit.workers.resource import WorkerResource

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
        return super()._init_llm()

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        options = cast("TinkerOptions", self.options)
        weights = self._requested_model, options.checkpoint_path, options.base_url, options.renderer
        source = _Source(*weights, options.timeout_s, self.logger.info)
        model = await _share_model(source).get()
        sampling = Sampling(
            max_tokens=options.max_tokens or MAX_TOKENS,
            temperature=1.0 if options.temperature is None else options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
        )
        self.policy = model.make_policy(
            sampling,
            seed=lambda turn: derive_seed(options.seed, "harbor", self.session_id or "", turn),
            context_tokens=options.context_tokens,
        )
        self._model_name = model.name
        await super().setup(environment)


@dataclass(frozen=True)
class _Source:
    """Weights, their service, and the chat format; the first trial of a source sets the limit and the log."""

    model: str | None
    checkpoint: str | None
    base_url: str | None
    renderer: str | None
    timeout_s: float = field(compare=False)
    note: Callable[[str], None] = field(compare=False)


@cache
def _share_model(source: _Source) -> WorkerResource[ServedModel]:
    return WorkerResource(partial(_connect, source))


@asynccontextmanager
async def _connect(source: _Source) -> AsyncGenerator[ServedModel]:
    config = ServiceConfig(base_url=source.base_url, timeout_s=source.timeout_s)
    choice, watch, note = choose_service(config), ServiceWatch(source.note, source.timeout_s), source.note
    async with connect(config, choice=choice, note=note) as service:
        load = partial(open_model, service, source.model or source.checkpoint or "", checkpoint=source.checkpoint)
        load = partial(load, renderer=source.renderer, with_weights=choice.kind == "engine", note=note)
        model = await watch.call(load, "preparing to sample", retry=True)
        yield replace(model, sampler=PatientSampler(model.sampler, watch, 0))
