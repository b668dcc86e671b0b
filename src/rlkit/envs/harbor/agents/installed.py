"""Harbor's installed agents, with an endpoint of the policy as the address of their model.

Invariant: an agent is supported if Harbor declares that it takes a base URL of OpenAI or Anthropic; the list is derived
from Harbor's registry. A program that is there already is not installed again. An agent is refused further replies
after its last turn, and ended if it does not end by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from urllib.parse import urlsplit

from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent, NonZeroAgentExitCodeError
from harbor.agents.model_connection import resolve_model_connection
from harbor.models.agent.name import AgentName

from rlkit.endpoint import Endpoint, open_endpoint
from rlkit.envs.harbor.agents.agent_end import EnvironmentDown, Tally, sum_tallies
from rlkit.envs.harbor.agents.policy_registry import AgentAccess
from rlkit.errors import UsageError, did_you_mean
from rlkit.policy import Policy
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment
    from harbor.models.agent.context import AgentContext
    from harbor.trial.trial import Trial

_GRACE_S = 10.0  # time for an agent to end after a limit: some repeat the refused request for minutes
_POLL_S = 0.2

_UNDECLARED: Mapping[str, tuple[str, str]] = {"openhands-sdk": ("LLM_BASE_URL", "LLM_API_KEY")}
"""Variables for the address and key of OpenAI's protocol in agents that do not declare them to Harbor."""

_MODEL_NAMES: Mapping[str, str] = {
    "aider": "openai/openai/policy",  # it drops the first provider, and its library needs one
    "claude-code": "claude-sonnet-4-5",  # with others it puts system messages amid conversations
    "openhands-sdk": "openai/policy",
}
"""Names of the model for agents that need another one than `provider/policy`."""

_OPTIONS: Mapping[str, Mapping[str, Json]] = {"pi": {"model_api": "openai-completions"}}
"""Options without which an agent refuses a base URL."""

_WITH_RUNNER = ("openhands-sdk", "strands")
"""Agents whose installation also copies a runner; the first looks itself for its packages."""


@runtime_checkable
class _Forwarding(Protocol):
    def forward_port(self, port: int) -> AbstractAsyncContextManager[None]: ...


@cache
def find_model_name(agent: str) -> str | None:
    """Return the name under which an agent of Harbor accepts the policy; None if it cannot be given a base URL."""
    cls = AgentFactory.get_agent_class(AgentName(agent))
    if agent in _MODEL_NAMES or cls.MODEL_CONNECTION is None or not issubclass(cls, BaseInstalledAgent):
        return _MODEL_NAMES.get(agent)

    def resolve(*names: str) -> tuple[str, str] | None:
        return next(((name, name) for name in names if name.startswith(("OPENAI_", "ANTHROPIC_"))), None)

    connection = resolve_model_connection("openai/policy", cls.MODEL_CONNECTION, resolve)
    is_connected = connection.api_key and connection.configured_base_url
    return f"{connection.provider}/policy" if is_connected else None


def check_agent(name: str, kwargs: Mapping[str, Json], *, own_names: Iterable[str]) -> None:
    """Raise a UsageError if Harbor has no such agent, it cannot use the policy, or it does not know an option."""
    names = AgentFactory.registered_names()
    if name not in names or find_model_name(name) is None:
        known = [*own_names, *filter(find_model_name, names)]
        problem = f"Harbor's {name} takes no base URL of its model" if name in names else f"there is no {name!r}"
        raise UsageError(f"agent: {problem}.{did_you_mean(name, known)} Known: {', '.join(known)}")
    try:
        AgentFactory.get_agent_class(AgentName(name)).parse_options({**kwargs})
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UsageError(f"agent_kwargs: {' '.join(lines[1:-1]) or lines[0]}") from None


@asynccontextmanager
async def open_installed_agent(
    name: str,
    policy: Policy,
    kwargs: Mapping[str, Json],
    env: Mapping[str, str],
    *,
    max_turns: int | None,
    endpoint_host: str | None,
) -> AsyncGenerator[AgentAccess]:
    """Let an agent use a policy until the end of the block; errors as of `open_endpoint`."""
    tallies = list[Tally]()
    async with open_endpoint(policy, host=endpoint_host, max_turns=max_turns) as endpoint:
        undeclared = dict(zip(_UNDECLARED.get(name, ()), (endpoint.url, endpoint.key), strict=False))
        fields: dict[str, Json] = {
            "name": name,
            "model_name": find_model_name(name),
            "kwargs": {**_OPTIONS.get(name, {}), **kwargs},
            "env": {**endpoint.variables, **undeclared, **env},
        }

        def prepare(trial: Trial) -> None:
            """Let the agent of a trial reach its model, and skip its installation if possible."""
            agent = trial.agent
            assert isinstance(agent, BaseInstalledAgent)
            install, run = agent.install, agent.run

            async def install_if_missing(environment: BaseEnvironment) -> None:
                if name in _WITH_RUNNER or not await _is_present(agent, environment):
                    try:
                        await install(environment)
                    except NonZeroAgentExitCodeError as error:
                        raise EnvironmentDown(f"{agent.name()} could not be installed: {error}") from error

            async def run_step(instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
                port = urlsplit(endpoint.root).port or 0
                forwarding = environment.forward_port(port) if isinstance(environment, _Forwarding) else nullcontext()
                tallies.append(tally := Tally())
                async with forwarding:
                    await _run_to_limit(run(instruction, environment, context), policy, endpoint, tally)

            agent.install, agent.run = install_if_missing, run_step

        yield AgentAccess(fields, lambda: sum_tallies(tallies), prepare)


async def _run_to_limit(
    running: Coroutine[object, object, None], policy: Policy, endpoint: Endpoint, tally: Tally
) -> None:
    """Run the agent on one step of its task; after a limit, end it, and ignore its exit code.

    Raises:
        NonZeroAgentExitCodeError: the agent failed.
        EnvironmentDown: the agent ended without a reply of its model.
    """
    agent, turn_count = asyncio.ensure_future(running), len(policy.turns)
    failure: NonZeroAgentExitCodeError | None = None
    try:
        while endpoint.limit is None and not agent.done():
            await asyncio.wait([agent], timeout=_POLL_S)
        await asyncio.wait([agent], timeout=_GRACE_S)
        if agent.done():
            agent.result()
    except NonZeroAgentExitCodeError as error:
        failure = error
    finally:
        agent.cancel()
        tally.count_turns(policy.turns[turn_count:])
        await asyncio.wait([agent])
    if endpoint.limit is not None:
        tally.record_error(endpoint.limit)
    elif not tally.turns:
        raise EnvironmentDown(f"the agent ended without a reply of its model: {failure or 'see its logs'}")
    elif failure is not None:
        raise failure
    else:
        tally.record_end("completed", "the agent's program ended")


async def _is_present(agent: BaseInstalledAgent, environment: BaseEnvironment) -> bool:
    if agent.version() is not None:  # the user wants this version
        return False
    commands = [f'export PATH="$HOME/.local/bin:$PATH"; command -v {agent.name()}', agent.get_version_command()]
    for command in filter(None, commands):
        result = await environment.exec(command)
        if result.return_code == 0 and result.stdout:
            return True
    return False
