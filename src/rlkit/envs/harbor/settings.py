"""Settings of trials: environment, agent, limits and rewards.

Invariant: plain frozen data, so that a task can be pickled and played in another process.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harbor.models.environment_type import EnvironmentType
from harbor.models.trial.config import EnvironmentConfig
from pydantic import ConfigDict, create_model

from rlkit._util.sections import validate_fields
from rlkit.config.loading.objects import load_object
from rlkit.envs.harbor.outcome import Reward, Rules
from rlkit.envs.harbor.phases import PhaseLimits
from rlkit.errors import UsageError, did_you_mean
from rlkit.policy import Policy
from rlkit.types import Json

if TYPE_CHECKING:
    from rlkit.envs.harbor.agents.agent import AgentAccess

LOCAL = "local"
LOCAL_SANDBOX = "rlkit.envs.harbor.sandbox:LocalSandbox"
RLKIT_ENVIRONMENTS = {LOCAL: LOCAL_SANDBOX, "beaker": "rlkit.envs.harbor.beaker:BeakerSandbox"}
"""Classes of rlkit's environments by name."""

type Keep = Literal["all", "failed", "none"]


AGENTS: Mapping[str, str] = {
    "terminus-2": "rlkit.envs.harbor.agents.terminus:PolicyTerminus2",
    "shell": "rlkit.envs.harbor.agents.shell:ShellAgent",
}
"""Classes of rlkit's agents by name."""


@dataclass(frozen=True)
class Agent:
    """An agent and its options."""

    name: str = "terminus-2"  # an agent of rlkit, or one of Harbor's installed agents
    max_turns: int | None = None  # maximum number of replies of the model; None for limits by time and context only
    parser: Literal["json", "xml"] = "json"  # format of a reply to Terminus 2
    summarize: bool = False  # let Terminus 2 continue from a summary when the context is nearly full
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    env: Mapping[str, str] = field(default_factory=dict[str, str])  # variables of an installed agent

    def __post_init__(self) -> None:
        keys = {"max_turns": "max_turns", "parser_name": "parser", "enable_summarize": "summarize"}
        for name in filter(keys.__contains__, self.kwargs):
            raise UsageError(f"agent_kwargs: {name} cannot be set here; set {keys[name]} instead")
        if self.name != "terminus-2":
            for name, is_default in (("parser", self.parser == "json"), ("summarize", not self.summarize)):
                if not is_default:
                    raise UsageError(
                        f"{name} has no effect on the {self.name} agent: leave it out, or set agent: terminus-2"
                    )
        if self.name == "shell":
            from rlkit.envs.harbor.agents.shell import ShellOptions

            validate_fields(ShellOptions, {**self.kwargs, "max_turns": self.max_turns}, place="agent_kwargs")
        if self.is_installed:
            from rlkit.envs.harbor.agents.installed import check_agent

            check_agent(self.name, self.kwargs, self.env, own_names=AGENTS)
        elif self.env:
            raise UsageError(f"agent_env has no effect on the {self.name} agent: leave it out")

    @property
    def is_installed(self) -> bool:
        """True for an agent of Harbor that is a program of its own."""
        return self.name not in AGENTS

    @property
    def module(self) -> str:
        """Module that the agent needs."""
        return "rlkit.envs.harbor.agents.installed" if self.is_installed else AGENTS[self.name].partition(":")[0]

    @property
    def options(self) -> dict[str, Json]:
        """All options of the class of an agent of rlkit."""
        options: dict[str, Json] = {} if self.max_turns is None else {"max_turns": self.max_turns}
        if self.name == "terminus-2":
            options |= {"parser_name": self.parser, "enable_summarize": self.summarize}
        return {**options, **self.kwargs}


@dataclass(frozen=True)
class TrialSettings:
    """Settings of the trials of a task."""

    environment: EnvironmentConfig = field(default_factory=lambda: EnvironmentConfig(import_path=LOCAL_SANDBOX))
    agent: Agent = field(default_factory=Agent)
    # Time limit of the agent, which overrides the task's; as `verifier_timeout_s` for its tests.
    agent_timeout_s: float | None = None
    verifier_timeout_s: float | None = None
    timeout_multiplier: float = 1.0  # factor of every time limit of a task
    phases: PhaseLimits = field(default_factory=PhaseLimits)
    rules: Rules = field(default_factory=Rules)
    reward: Reward = field(default_factory=Reward)
    trials_dir: Path | None = None  # parent of the trials' folders; None for a temporary folder, removed with the trial
    keep: Keep = "none"  # trials whose folders are kept

    def __post_init__(self) -> None:
        if self.keep != "none" and self.trials_dir is None:
            raise UsageError(f"keep_trials: {self.keep} needs a folder for the trials: set trials_dir")

    def open_agent(self, policy: Policy) -> AbstractAsyncContextManager[AgentAccess]:
        """Let the agent use a policy until the end of the block; errors of an installed one as of `open_endpoint`.

        Raises:
            UsageError: an installed agent cannot reach the policy from its environment.
        """
        agent, is_remote = self.agent, self.environment.import_path != LOCAL_SANDBOX
        if not agent.is_installed:
            from rlkit.envs.harbor.agents.agent import give_policy

            return nullcontext(give_policy(policy, import_path=AGENTS[agent.name], options=agent.options))
        from rlkit.envs.harbor.agents.installed import open_installed_agent

        host = policy.endpoint_host if is_remote else None
        if is_remote and host is None:
            raise UsageError(
                f"the agent {agent.name} cannot reach its model from its environment: set rollouts.endpoint_host "
                "to a name or address under which this machine is reached from there"
            )
        return open_installed_agent(
            agent.name, policy, agent.kwargs, agent.env, max_turns=agent.max_turns, endpoint_host=host
        )


def make_environment(
    name: str,
    kwargs: Mapping[str, Json] | None = None,
    *,
    cpus: int | None = None,
    memory_mb: int | None = None,
    storage_mb: int | None = None,
    force_build: bool = False,
) -> EnvironmentConfig:
    """Make the environment `local`, `beaker`, a Harbor type, or `package.module:Class`.

    `kwargs` are passed to its class. `cpus`, `memory_mb` and `storage_mb` override the task's requests.

    Raises:
        UsageError: the environment does not exist, or a class of rlkit does not accept an argument.
    """
    arguments = dict(kwargs or {})
    names = [LOCAL, *(kind.value for kind in EnvironmentType), *(kind for kind in RLKIT_ENVIRONMENTS if kind != LOCAL)]
    if ":" in name:
        load_object(name, field="environment")
    elif name not in names:
        hint = did_you_mean(name, names)
        raise UsageError(f"environment: there is no {name!r}.{hint} Known: {', '.join(names)}, or package.module:Class")
    if name in RLKIT_ENVIRONMENTS:
        _check_arguments(name, arguments)
    path = RLKIT_ENVIRONMENTS.get(name, name if ":" in name else None)
    return EnvironmentConfig(
        type=None if path else EnvironmentType(name),
        import_path=path,
        kwargs=arguments,
        override_cpus=cpus,
        override_memory_mb=memory_mb,
        override_storage_mb=storage_mb,
        force_build=force_build,
    )


def _check_arguments(environment: str, arguments: Mapping[str, Json]) -> None:
    cls = load_object(RLKIT_ENVIRONMENTS[environment], field="environment")
    assert isinstance(cls, type)
    parameters = inspect.signature(cls.__init__, eval_str=True).parameters.values()
    fields: dict[str, Any] = {
        parameter.name: (parameter.annotation, parameter.default)
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    model = create_model(environment, __config__=ConfigDict(extra="forbid", strict=True), **fields)
    validate_fields(model, arguments, place="environment_kwargs")
