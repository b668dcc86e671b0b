"""How tasks are played: everything but the tasks themselves.

Invariant: plain frozen data, so that a task can be pickled and played in another process.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from rlkit.config.loading.objects import load_object
from rlkit.envs.harbor.outcome import Reward, Rules
from rlkit.envs.harbor.phases import PhaseLimits
from rlkit.errors import UsageError, did_you_mean
from rlkit.types import Json

LOCAL = "local"
LOCAL_SANDBOX = "rlkit.envs.harbor.sandbox:LocalSandbox"
OWN = {LOCAL: LOCAL_SANDBOX, "beaker": "rlkit.envs.harbor.beaker:BeakerSandbox"}
"""Environments of rlkit's own, by their names."""

_CALLED = {LOCAL: "the local sandbox", "beaker": "a job of Beaker"}

type Keep = Literal["all", "failed", "none"]


@dataclass(frozen=True)
class Environment:
    """Where trials run: `type` is a name of Harbor's, `import_path` a class; one of them is None."""

    type: str | None = None
    import_path: str | None = LOCAL_SANDBOX
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])
    cpus: int | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    force_build: bool = False


type AgentName = Literal["terminus2", "shell"]

AGENTS: Mapping[AgentName, str] = {
    "terminus2": "rlkit.envs.harbor.agents.agent:RLTerminus2",
    "shell": "rlkit.envs.harbor.agents.shell:ShellAgent",
}
"""The classes of the agents, by their names."""


@dataclass(frozen=True)
class Agent:
    """An agent and its options.

    Args:
        max_turns: replies of the model; None for as many as its time and its context allow.
        parser: the form of a reply to Terminus 2.
        summarize: whether Terminus 2 goes on from a summary when the context is nearly full.
    """

    name: AgentName = "terminus2"
    max_turns: int | None = None
    parser: Literal["json", "xml"] = "json"
    summarize: bool = False
    kwargs: Mapping[str, Json] = field(default_factory=dict[str, Json])

    def __post_init__(self) -> None:
        own = {"max_turns": "max_turns", "parser_name": "parser", "enable_summarize": "summarize", "policy": None}
        for name in self.kwargs:
            if name in own:
                raise UsageError(f"agent_kwargs: {name} is not set here; set {own[name] or 'nothing for it'}")
        if self.name == "shell":
            for name, is_default in (("parser", self.parser == "json"), ("summarize", not self.summarize)):
                if not is_default:
                    raise UsageError(f"{name} has no effect on the shell agent: leave it out, or set agent: terminus2")
            self._check_shell()

    @property
    def import_path(self) -> str:
        """Path of the class that Harbor makes."""
        return AGENTS[self.name]

    def options(self, policy: str) -> dict[str, Json]:
        """Return all options of an agent that plays with this policy."""
        own: dict[str, Json] = {"policy": policy}
        if self.max_turns is not None:
            own["max_turns"] = self.max_turns
        if self.name == "terminus2":
            own |= {"parser_name": self.parser, "enable_summarize": self.summarize}
        return {**own, **self.kwargs}

    def _check_shell(self) -> None:
        from rlkit.envs.harbor.agents.shell import ShellOptions

        try:
            ShellOptions.read({**self.kwargs, "max_turns": self.max_turns})
        except UsageError as error:
            raise UsageError(f"agent_kwargs: {error}") from None


@dataclass(frozen=True)
class TrialSettings:
    """How a task is played.

    Args:
        agent_timeout_s: limit in the place of the task's own, as is `verifier_timeout_s`.
        timeout_multiplier: factor of every time limit of a task.
        trials_dir: folder of the trials' folders; None for one of rlkit's own, which goes with the trial.
        keep: the folders that stay.
    """

    environment: Environment = field(default_factory=Environment)
    agent: Agent = field(default_factory=Agent)
    agent_timeout_s: float | None = None
    verifier_timeout_s: float | None = None
    timeout_multiplier: float = 1.0
    phases: PhaseLimits = field(default_factory=PhaseLimits)
    rules: Rules = field(default_factory=Rules)
    reward: Reward = field(default_factory=Reward)
    trials_dir: Path | None = None
    keep: Keep = "none"

    def __post_init__(self) -> None:
        if self.keep != "none" and self.trials_dir is None:
            raise UsageError(f"keep_trials: {self.keep} needs a folder to keep them in: set trials_dir")


def make_environment(
    name: str,
    kwargs: Mapping[str, Json] | None = None,
    *,
    cpus: int | None = None,
    memory_mb: int | None = None,
    storage_mb: int | None = None,
    force_build: bool = False,
) -> Environment:
    """Return the environment `local`, `beaker`, a type of Harbor's, or `package.module:Class`.

    Its class takes `kwargs`. `cpus`, `memory_mb` and `storage_mb` are in the place of what a task asks for.

    Raises:
        UsageError: there is no such environment, or one of rlkit's own takes no such argument.
    """
    from harbor.models.environment_type import EnvironmentType

    given = dict(kwargs or {})
    known = [LOCAL, *(one.value for one in EnvironmentType), *(own for own in OWN if own != LOCAL)]
    if ":" in name:
        load_object(name, field="environment")
    elif name not in known:
        hint = did_you_mean(name, known)
        raise UsageError(f"environment: there is no {name!r}.{hint} Known: {', '.join(known)}, or package.module:Class")
    if name in OWN:
        _check_own(name, given)
    path = OWN.get(name, name if ":" in name else None)
    return Environment(
        type=None if path else name,
        import_path=path,
        kwargs=given,
        cpus=cpus,
        memory_mb=memory_mb,
        storage_mb=storage_mb,
        force_build=force_build,
    )


def _check_own(environment: str, kwargs: Mapping[str, Json]) -> None:
    made = load_object(OWN[environment], field="environment")
    assert isinstance(made, type)
    parameters = inspect.signature(made.__init__, eval_str=True).parameters.values()
    known = {one.name: one.annotation for one in parameters if one.kind is one.KEYWORD_ONLY}
    for name, value in kwargs.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}"
            raise UsageError(f"environment_kwargs.{name}: {_CALLED[environment]} takes no such argument. {hint}")
        try:
            TypeAdapter(known[name]).validate_python(value, strict=True)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise UsageError(f"environment_kwargs.{name}: {value!r} is no value for it: {said}") from None
