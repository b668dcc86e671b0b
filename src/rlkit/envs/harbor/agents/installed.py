"""Harbor's installed agents, with an endpoint of the policy as the address of their model.

Invariant: an agent is supported if Harbor declares that it takes a base URL of OpenAI or Anthropic, or if a table here
says how it takes one. Each trial has its own address and key. No variable of this process is changed, and none with a
secret reaches an agent. A program that is there already is not installed again. An agent is refused further replies
after its last turn, and ended if it does not end by itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from urllib.parse import urlsplit

from harbor.agents.factory import AgentFactory
from harbor.agents.installed.base import BaseInstalledAgent, NonZeroAgentExitCodeError
from harbor.agents.model_connection import resolve_model_connection
from harbor.models.agent.name import AgentName
from harbor.models.trial.config import AgentConfig
from harbor.utils.env import resolve_env_vars

from rlkit._util.redaction import is_secret_name
from rlkit.config.loading.nodes import from_python, merge, plain
from rlkit.endpoint import Endpoint, open_endpoint
from rlkit.envs.harbor.agents.agent import AgentAccess, AgentEnd, EnvironmentDown
from rlkit.errors import UsageError, did_you_mean
from rlkit.policy import Policy
from rlkit.types import Json

if TYPE_CHECKING:
    from harbor.environments.base import BaseEnvironment
    from harbor.models.agent.context import AgentContext
    from harbor.trial.trial import Trial

_GRACE_S = 10.0  # time for an agent to end after a limit: some repeat the refused request for minutes
_POLL_S = 0.2


@dataclass(frozen=True)
class _Connection:
    """Settings of an agent in addition to the endpoint's variables; `{url}` and `{key}` are its address and key."""

    model: str = "openai/policy"
    variables: Mapping[str, Json] = field(default_factory=dict[str, Json])
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    rivals: tuple[str, ...] = ()  # variables that the agent would prefer to the endpoint's address or key
    host_variable: str | None = None  # of this process; Harbor does not start the agent without it


_CONNECTIONS: Mapping[str, _Connection] = {
    "aider": _Connection(
        "openai/openai/policy",  # it drops the first provider, and its library needs one
        rivals=("AIDER_API_KEY", "AIDER_OPENAI_API_BASE", "AIDER_OPENAI_API_KEY"),
    ),
    "claude-code": _Connection(
        "claude-sonnet-4-5",  # with others it puts system messages amid conversations
        rivals=(
            "ANTHROPIC_AUTH_TOKEN",
            "AWS_BEARER_TOKEN_BEDROCK",
            "CLAUDE_CODE_USE_BEDROCK",
            "CLAUDE_CODE_USE_FOUNDRY",
            "CLAUDE_CODE_USE_VERTEX",
            "CLAUDE_FORCE_OAUTH",
        ),
    ),
    "code-puppy": _Connection(options={"base_url": "{url}"}, rivals=("CODE_PUPPY_API_KEY",)),
    "codex": _Connection(
        rivals=("CODEX_ACCESS_TOKEN", "CODEX_API_KEY", "CODEX_AUTH_JSON_PATH", "CODEX_FORCE_AUTH_JSON")
    ),
    "copilot-cli": _Connection(
        "gpt-5-mini",  # with names that it does not know it sends top_p
        {"COPILOT_PROVIDER_BASE_URL": "{url}", "COPILOT_PROVIDER_API_KEY": "{key}", "COPILOT_OFFLINE": "true"},
        rivals=("COPILOT_PROVIDER_BEARER_TOKEN", "COPILOT_PROVIDER_TYPE"),
    ),
    "deerflow": _Connection("openrouter/policy", {"OPENROUTER_API_KEY": "{key}"}, {"openrouter_base_url": "{url}"}),
    "eve": _Connection(options={"auto_env": False}),  # it would get all variables that its project names
    "goose": _Connection(rivals=("GOOSE_PROVIDER",)),
    "grok-build": _Connection(
        options={"grok_config": {"model": {"policy": {"base_url": "{url}", "api_backend": "chat_completions"}}}}
    ),
    "hermes": _Connection(host_variable="OPENAI_API_KEY"),
    "kimi-cli": _Connection(options={"base_url": "{url}", "api_key": "{key}"}),
    "kimi-code": _Connection(
        "policy",
        {"KIMI_MODEL_BASE_URL": "{url}", "KIMI_MODEL_API_KEY": "{key}", "KIMI_MODEL_PROVIDER_TYPE": "openai"},
    ),
    "langgraph": _Connection(),
    "mini-swe-agent": _Connection(rivals=("MSWEA_API_KEY",)),
    "nemo-agent": _Connection(options={"llm_type": "openai"}),
    "openclaw": _Connection(),
    "openhands": _Connection(  # it would prefer these to its other variables
        variables={"LLM_BASE_URL": "{url}", "LLM_API_KEY": "{key}"}, options={"api_base": "{url}"}
    ),
    "openhands-sdk": _Connection(variables={"LLM_BASE_URL": "{url}", "LLM_API_KEY": "{key}"}),
    "pi": _Connection(options={"model_api": "openai-completions"}),
    "qwen-coder": _Connection(options={"base_url": "{url}", "api_key": "{key}"}),
    "swe-agent": _Connection(options={"per_instance_cost_limit": "0"}),  # it knows no price of the policy
    "trae-agent": _Connection(options={"top_p": "1"}),
    "vibe": _Connection(options={"backend": "generic"}, rivals=("VIBE_API_BASE", "VIBE_API_KEY_ENV", "VIBE_BACKEND")),
}
"""Agents that do not declare to Harbor how they take a base URL, need another name or option, or have rivals."""

_WITH_RUNNER = ("openhands-sdk", "strands")
"""Agents without a program, whose installation copies a runner beside their packages."""

_WITH_PROJECT = ("deerflow", "eve", "langgraph")
"""Agents whose installation also copies or writes a project, and is therefore never left out."""


@runtime_checkable
class _Forwarding(Protocol):
    def forward_port(self, port: int) -> AbstractAsyncContextManager[None]: ...


@cache
def find_model_name(agent: str) -> str | None:
    """Return the name under which an agent of Harbor accepts the policy; None if it cannot be given a base URL."""
    cls = AgentFactory.get_agent_class(AgentName(agent))
    if agent in _CONNECTIONS:
        return _CONNECTIONS[agent].model
    if cls.MODEL_CONNECTION is None or not issubclass(cls, BaseInstalledAgent):
        return None

    def resolve(*names: str) -> tuple[str, str] | None:
        return next(((name, name) for name in names if name.startswith(("OPENAI_", "ANTHROPIC_"))), None)

    connection = resolve_model_connection("openai/policy", cls.MODEL_CONNECTION, resolve)
    is_connected = connection.api_key and connection.configured_base_url
    return f"{connection.provider}/policy" if is_connected else None


def check_agent(name: str, kwargs: Mapping[str, Json], env: Mapping[str, str], *, own_names: Iterable[str]) -> None:
    """Raise a UsageError if Harbor has no such agent, it cannot use the policy, or it refuses an option or variable."""
    names = AgentFactory.registered_names()
    if name not in names or find_model_name(name) is None:
        known = [*own_names, *filter(find_model_name, names)]
        problem = f"there is no {name!r}.{did_you_mean(name, known)}"
        if name in names:
            problem = f"Harbor cannot give {name} the base URL of a server of OpenAI's or Anthropic's protocol."
        raise UsageError(f"agent: {problem} Known: {', '.join(known)}")
    variable = _CONNECTIONS.get(name, _Connection()).host_variable
    if variable and not os.environ.get(variable):
        raise UsageError(
            f"agent: Harbor starts {name} only if the variable {variable} is set in the environment of rlkit. Set it "
            "to any value: the agent gets the key of its rollout instead."
        )
    try:
        variables = resolve_env_vars({**env})
    except ValueError as error:
        raise UsageError(f"agent_env: {error}") from None
    try:
        AgentFactory.get_agent_class(AgentName(name)).parse_options({**kwargs}, variables)
        fields = _make_fields(name, Endpoint("http://127.0.0.1", "the key of a rollout"), kwargs, env)
        AgentFactory.create_agent_from_config(AgentConfig.model_validate(fields), logs_dir=Path())
    except (OSError, TypeError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UsageError(f"agent_kwargs: {' '.join(lines[1:-1]) or lines[0]}") from None


def _make_fields(name: str, endpoint: Endpoint, kwargs: Mapping[str, Json], env: Mapping[str, str]) -> dict[str, Json]:
    """Return Harbor's configuration of an agent; raise a UsageError if a user's setting replaces the connection."""
    connection = _CONNECTIONS.get(name, _Connection())
    if rivals := [variable for variable in connection.rivals if variable in env]:
        raise UsageError(
            f"agent_env: {name} would prefer {' and '.join(rivals)} to the policy's endpoint: leave out such variables"
        )
    variables = {**endpoint.variables, **_fill_in(connection.variables, endpoint)}
    return {
        "name": name,
        "model_name": find_model_name(name),
        "kwargs": _merge(_fill_in(connection.options, endpoint), kwargs, endpoint, place="agent_kwargs"),
        "env": _merge(variables, env, endpoint, place="agent_env"),
    }


def _merge(own: Mapping[str, Json], user: Mapping[str, Json], endpoint: Endpoint, *, place: str) -> dict[str, Json]:
    merged = plain(merge(from_python(own), from_python(user)))
    assert isinstance(merged, dict)
    for name in filter(user.__contains__, own):
        before, after = json.dumps(own[name]), json.dumps(merged[name])
        if any(text in before and text not in after for text in (endpoint.root, endpoint.key)):
            raise UsageError(f"{place}: {name} has the address or key of the rollout's policy: leave it to rlkit")
    return merged


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
    ends = list[AgentEnd]()
    async with open_endpoint(policy, host=endpoint_host, max_turns=max_turns) as endpoint:
        fields = _make_fields(name, endpoint, kwargs, env)

        def prepare(trial: Trial) -> None:
            """Let the agent of a trial reach its model, and skip its installation if possible."""
            agent = trial.agent
            assert isinstance(agent, BaseInstalledAgent)
            _hide_variables_of_host(agent)
            install, run, execute = agent.install, agent.run, agent.exec_as_agent

            async def install_if_missing(environment: BaseEnvironment) -> None:
                if name not in _WITH_PROJECT and await _is_present(agent, environment):
                    if name not in _WITH_RUNNER:
                        return
                    agent.exec_as_agent = _skip_command  # by which packages are installed
                try:
                    await install(environment)
                except NonZeroAgentExitCodeError as error:
                    raise EnvironmentDown(f"{agent.name()} could not be installed: {error}") from error
                finally:
                    agent.exec_as_agent = execute

            async def execute_with_logs(environment: BaseEnvironment, command: str, env: dict[str, str]) -> None:
                """Let the command read what the agent wrote into the folder of its logs on this machine."""
                await environment.upload_dir(agent.logs_dir, agent.environment_logs_dir.as_posix())
                await execute(environment, command, env)

            async def run_step(instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
                port = urlsplit(endpoint.root).port or 0
                forwarding = environment.forward_port(port) if isinstance(environment, _Forwarding) else nullcontext()
                ends.append(end := AgentEnd())
                if name == "openclaw" and not environment.capabilities.mounted:
                    agent.exec_as_agent = execute_with_logs  # pyright: ignore[reportAttributeAccessIssue]  it gives these
                async with forwarding:
                    await _run_to_limit(run(instruction, environment, context), policy, endpoint, end, agent.logger)

            agent.install, agent.run = install_if_missing, run_step

        yield AgentAccess(fields, ends, prepare)


def _fill_in(template: Mapping[str, Json], endpoint: Endpoint) -> dict[str, Json]:
    """Put the address and key of an endpoint into a template of variables or options."""
    return json.loads(json.dumps(template).replace("{url}", endpoint.url).replace("{key}", endpoint.key))


def _hide_variables_of_host(agent: BaseInstalledAgent) -> None:
    """Let an agent take its secrets, and the variables of its model, only from its own configuration."""
    # Otherwise it would pass on the user's keys and tokens, and prefer services of the user to the endpoint.
    execute, own = agent._exec, (agent._resolved_env_vars, agent.extra_env)  # pyright: ignore[reportPrivateUsage]  Harbor offers no other way

    async def execute_without_secrets(
        environment: BaseEnvironment,
        command: str,
        *,
        user: str | int | None = None,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout_sec: int | None = None,
    ) -> object:
        secrets = {value for name, value in os.environ.items() if is_secret_name(name)}
        variables = {
            name: value for name, value in (env or {}).items() if value not in secrets or not is_secret_name(name)
        }
        return await execute(environment, command, user=user, env=variables, cwd=cwd, timeout_sec=timeout_sec)

    agent._env_sources, agent._exec = lambda: own, execute_without_secrets  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]  likewise; it names the arguments


async def _run_to_limit(
    running: Coroutine[object, object, None], policy: Policy, endpoint: Endpoint, end: AgentEnd, log: logging.Logger
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
        end.count_turns(policy.turns[turn_count:])
        await asyncio.wait([agent])
    if endpoint.limit is not None:
        end.record_error(endpoint.limit, log)
    elif not end.turns:
        raise EnvironmentDown(f"the agent ended without a reply of its model: {failure or 'see its logs'}")
    elif failure is not None:
        raise failure
    else:
        end.record("completed", "the agent's program ended")


async def _skip_command(*_: object, **__: object) -> None:
    """Replace the commands of an installation."""


async def _is_present(agent: BaseInstalledAgent, environment: BaseEnvironment) -> bool:
    if agent.version() is not None:  # the user wants this version
        return False
    program = f'export PATH="$HOME/.local/bin:$PATH"; command -v {agent.name()}'
    commands = [None if agent.name() in _WITH_RUNNER else program, agent.get_version_command()]
    for command in filter(None, commands):
        result = await environment.exec(command)
        if result.return_code == 0 and result.stdout:
            return True
    return False
