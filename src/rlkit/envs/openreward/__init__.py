"""Environments of OpenReward, hosted or on your own servers that speak the Open Reward Standard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, JsonValue

from rlkit._util.sections import Positive, validate_fields
from rlkit._util.threads import run_in_new_loop
from rlkit.envs.openreward.listing import Split, list_tasks, settle_tasks
from rlkit.envs.openreward.rewards import Reduction, RewardRule
from rlkit.errors import UsageError
from rlkit.types import Json

if TYPE_CHECKING:
    from rlkit.envs.openreward.connection.servers import LocalServer
    from rlkit.envs.openreward.connection.target import Target
    from rlkit.envs.openreward.task import OpenRewardTask

__all__ = ["openreward"]

type Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def openreward(
    *,
    target: str | None = None,
    server: str | Sequence[str] | None = None,
    variant: str | None = None,
    splits: str | Sequence[str] | dict[str, Split | dict[str, JsonValue] | None] | None = None,
    max_turns: Positive = 16,
    max_total_tokens: Positive | None = None,
    on_message: Literal["end", "nudge"] = "end",
    system_prompt: str | None = None,
    toolset: str | None = None,
    reward_reduction: Reduction = "sum",
    nonterminal_reward: float | None = None,
    min_reward: float | None = None,
    max_reward: float | None = None,
    group_score: Literal["add", "replace", "off"] = "add",
    secrets: dict[str, str | dict[str, str | Sequence[str]]] | None = None,
    send_api_key: bool = False,
    max_sessions: Positive = 256,
    start_timeout_s: Seconds = 600.0,
    call_timeout_s: Seconds = 600.0,
    request_timeout_s: Seconds = 60.0,
    seed: Annotated[int, Field(ge=0)] = 0,
    pin: Callable[[Json], Json] = lambda now: now,
    note: Callable[[str], None] = lambda message: None,
) -> Sequence[OpenRewardTask]:
    """Return the tasks of an environment that speaks the Open Reward Standard.

    Args:
        target: `Owner/Name` or `Owner/Name@version` on OpenReward, or the URL of a server, `http://host:port`; with
            `#variant` after it if a server has several environments.
        server: command that starts a local server, with `{port}` for the port. It ends with the run.
        variant: environment of the server.
        splits: names of splits, or a mapping from names to `shuffle`, `num_samples` and `size`; by default `train`, or
            the only one.
        max_turns: limit of replies of the model in a rollout.
        max_total_tokens: limit of a rollout with the environment's messages; by default the model's context.
        on_message: reaction to a reply without a call that the environment does not accept as an answer: the rollout
            ends, or the model is asked to call a tool.
        toolset: OpenReward's own toolset, such as `claude-code`, in addition to the environment's tools.
        reward_reduction: function of the rewards of a rollout's calls; calls without a reward are ignored.
        nonterminal_reward: additional reward of a rollout that the environment did not end.
        group_score: add the environment's scores of a group to the rewards, replace the rewards, or request no scores.
        secrets: variable by the environment's own name; or `env`, the variable, and `domains`, the allowed hosts.
        send_api_key: also send OpenReward's key to a server with a URL.
        max_sessions: limit of concurrent sessions; it is reduced while the server is busy.
        start_timeout_s: limit for opening a session, including its prompt.
        pin: maps the current tasks to those recorded when the run began.
        note: called with remarks about the tasks.

    Raises:
        UsageError: the environment does not exist, arguments contradict each other, or the tasks of a resumed run no
            longer exist.
        MissingError: the key for OpenReward is not set.
    """
    from rlkit.envs.openreward.connection import sdk
    from rlkit.envs.openreward.connection.clients import Access
    from rlkit.envs.openreward.connection.secrets import parse_secrets
    from rlkit.envs.openreward.session import TimeLimits
    from rlkit.envs.openreward.settings import Settings
    from rlkit.envs.openreward.task import OpenRewardTask

    reward = RewardRule(reward_reduction, nonterminal_reward, min_reward, max_reward)
    target_server, running = _open_target(target, server, variant, start_timeout_s)
    hosted = target_server.base_url is None
    if hosted and send_api_key:
        raise UsageError("send_api_key has no effect on OpenReward, which always gets its key: leave it out")
    sdk.load()
    parsed_secrets = parse_secrets(secrets or {}, hosted=hosted)
    selected = _parse_splits(splits)
    access = Access(target_server, send_api_key)
    access, sizes = run_in_new_loop(list_tasks(access, selected, limit_s=request_timeout_s))
    settings = Settings(
        access=access,
        secrets=parsed_secrets,
        reward=reward,
        time=TimeLimits(start_timeout_s, call_timeout_s, request_timeout_s),
        max_turns=max_turns,
        max_tokens=max_total_tokens,
        on_message=on_message,
        system_prompt=system_prompt,
        toolset=toolset,
        group_score=group_score,
        max_sessions=max_sessions,
    )
    tasks = settle_tasks(access, sizes, selected or {}, seed=seed, limit_s=request_timeout_s, pin=pin, note=note)
    return [OpenRewardTask(split, index, settings, running) for split, index in tasks]


def _open_target(
    target: str | None, server: str | Sequence[str] | None, variant: str | None, within_s: float
) -> tuple[Target, LocalServer | None]:
    from rlkit.envs.openreward.connection.target import Target, parse_target

    if (target is None) == (server is None):
        raise UsageError("target or server: give one of them")
    if server is None:
        if variant is not None:
            raise UsageError("variant has no effect on a target: append #variant to the target")
        return parse_target(target or ""), None
    from rlkit.envs.openreward.connection.servers import local_server

    running = local_server(server, within_s=within_s)
    return Target("local", running.url, None if variant is None else variant.lower()), running


def _parse_splits(
    splits: str | Sequence[str] | Mapping[str, Split | dict[str, JsonValue] | None] | None,
) -> dict[str, Split] | None:
    if splits is None:
        return None
    if isinstance(splits, Mapping):
        parsed = {name: validate_fields(Split, value or {}, place=f"splits.{name}") for name, value in splits.items()}
    else:
        parsed = dict.fromkeys([splits] if isinstance(splits, str) else splits, Split())
    if not parsed:
        raise UsageError("splits is empty: name at least one split, or leave it out")
    return parsed
