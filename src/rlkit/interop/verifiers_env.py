# verifiers is optional, so that type checkers do not know it.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUntypedBaseClass=false, reportUntypedFunctionDecorator=false
"""An rlkit environment as a taskset and a harness of verifiers.

Invariant: the reward of a trace is that of its outcome. Without an outcome, scoring is an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, override

import verifiers.v1 as vf
from pydantic import Field

from rlkit.env import Env
from rlkit.errors import EnvironmentFault, LimitReached
from rlkit.evaluation.openai_endpoint import Endpoint, EndpointPolicy, connect_endpoint
from rlkit.interop import MAX_TOKENS, as_chat, name_tasks
from rlkit.policy import ChatRequest, Limits, Reply, SampleRequest
from rlkit.rollout.validation import as_outcome
from rlkit.tasks.sources import Tasks
from rlkit.types import Sampling

__all__ = ["RlkitHarness", "RlkitTaskset"]

_PLUGIN = "rlkit_tasks"
sys.modules.setdefault(_PLUGIN, sys.modules[__name__])  # verifiers finds a plugin by the name of a top-level module


def verifiers_environment(tasks: Tasks) -> vf.Env:
    """Return an environment of verifiers with these tasks; UsageError as in `inspect_task`."""
    agent = {"runtime": {"type": "subprocess"}}  # unused: the rollout is played in this process
    environment = vf.SingleAgentEnv(
        vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": _PLUGIN}, "agent": agent})
    )
    environment.taskset.envs = list(name_tasks(tasks).values())
    return environment


class _State(vf.State):
    env: Any = Field(None, exclude=True)
    outcome: Any = Field(None, exclude=True)


class _Task(vf.Task[vf.TaskData, _State]):
    def __init__(self, data: vf.TaskData, env: Env) -> None:
        super().__init__(data)
        self._env = env

    async def setup(self, trace: vf.Trace) -> None:
        trace.state.env = self._env

    @vf.reward
    async def reward(self, trace: vf.Trace) -> float:
        if trace.state.outcome is None:
            raise EnvironmentFault("the episode ended without an outcome")
        return trace.state.outcome.reward


class RlkitTaskset(vf.Taskset[_Task, vf.TasksetConfig]):
    """Taskset of `envs`, which a subclass sets."""

    envs: Tasks = ()

    def load(self) -> Iterator[_Task]:  # noqa: D102  inherited
        for name, env in name_tasks(self.envs).items():
            yield _Task(vf.TaskData(id=name, name=name, prompt=str(getattr(env, "content", name))), env)


class RlkitHarness(vf.Harness[vf.HarnessConfig]):
    """Harness that plays an env in this process; its policy sends requests to the interception of verifiers."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(  # noqa: D102  inherited
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str, *rest: object
    ) -> vf.ProgramResult:
        env, address = trace.state.env, Endpoint(endpoint, ctx.model, secret)
        async with connect_endpoint(address, timeout_s=600, policy=_InterceptedPolicy) as make_policy:
            policy = make_policy(Sampling(ctx.sampling.max_tokens or MAX_TOKENS), Limits())
            outcome = as_outcome(await env.rollout(policy), env=type(env).__name__, turns=policy.turns)
        trace.state.outcome = outcome
        trace.record_metrics(outcome.metrics)
        trace.info.update(outcome.info, truncated=outcome.truncated)
        return vf.ProgramResult(0, "", "")


class _InterceptedPolicy(EndpointPolicy):
    @override
    def _make_settings(self, request: SampleRequest | ChatRequest) -> dict[str, Any]:
        """Return the settings of the env alone: verifiers adds those of the evaluation."""
        own = {"max_tokens": request.max_tokens, "temperature": request.temperature}
        return {"model": self._endpoint.model, **{name: value for name, value in own.items() if value is not None}}

    @override
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        try:
            return await super()._respond(as_chat(request))
        except EnvironmentFault as error:
            if "rollout stopped" in str(error):  # a limit of verifiers
                raise LimitReached(str(error)) from error
            raise
