"""Environments of OpenReward, hosted or on servers of one's own that speak the Open Reward Standard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, TypeGuard

from pydantic import Field, JsonValue

from rlkit.envs.openreward.listing import Split, choose_tasks, list_tasks, settle_sizes
from rlkit.envs.openreward.rewards import Reduction, RewardRule
from rlkit.errors import UsageError, did_you_mean
from rlkit.types import Json

if TYPE_CHECKING:
    from rlkit.envs.openreward.connection.servers import LocalServer
    from rlkit.envs.openreward.settings import Settings
    from rlkit.envs.openreward.source import OpenRewardTasks
    from rlkit.envs.openreward.task import OpenRewardTask

__all__ = ["openreward"]

type Count = Annotated[int, Field(ge=1)]
_OF_SPLIT = {"shuffle": True, "num_samples": None, "size": None}
"""What may be said of a split, with the defaults."""

type Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def openreward(
    *,
    target: str | None = None,
    server: str | Sequence[str] | None = None,
    variant: str | None = None,
    splits: str | Sequence[str] | dict[str, Split | dict[str, JsonValue] | None] | None = None,
    max_turns: Count = 16,
    max_total_tokens: Count | None = None,
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
    max_sessions: Count = 256,
    start_timeout_s: Seconds = 600.0,
    call_timeout_s: Seconds = 600.0,
    request_timeout_s: Seconds = 60.0,
    seed: Annotated[int, Field(ge=0)] = 0,
    recorded: Callable[[Json], Json] = lambda now: now,
    note: Callable[[str], None] = lambda message: None,
) -> OpenRewardTasks:
    """Tasks of an environment that speaks the Open Reward Standard.

    Args:
        target: `Owner/Name` or `Owner/Name@version` on OpenReward, or the URL of a server, `http://host:port`; with
            `#variant` after it where a server has several environments.
        server: instead, a command that starts a server of one's own, with `{port}` where the port goes. It ends with
            the run.
        variant: with `server`, which of its environments.
        splits: names of splits, or by their names `shuffle`, `num_samples` and `size`; by default `train`, or the only
            one.
        max_turns: replies of the model in one rollout.
        max_total_tokens: of a rollout, what the environment says included; by default what the model's context holds.
        on_message: what becomes of a reply that calls no tool, where the environment does not take it as an answer: the
            rollout ends, or the model is told to call one.
        system_prompt: said before everything else.
        toolset: of OpenReward's own, such as `claude-code`, added to the environment's tools.
        reward_reduction: of the rewards of a rollout's calls. A call without a reward takes no part.
        nonterminal_reward: one more reward, of a rollout that the environment did not end.
        min_reward: a rollout's reward is at least this.
        max_reward: a rollout's reward is at most this.
        group_score: where the environment compares the episodes of a group, what comes of it is added to an episode's
            reward, or replaces it, or is not asked for.
        secrets: by the names that the environment knows, the variables that hold them; or `env`, the variable, and
            `domains`, the hosts that it may be sent to.
        send_api_key: send the key of OpenReward to a server that is named by its URL, too.
        max_sessions: at once; fewer while the server says that it has too much to do.
        start_timeout_s: seconds until a session has its prompt.
        call_timeout_s: seconds that a call of a tool may take.
        request_timeout_s: seconds that any other request may take.
        seed: of the order of tasks, and of which ones are taken.
        recorded: told which tasks there are; gives which there were when the run began.
        note: told what a person should know of the tasks.

    Raises:
        UsageError: there is no such environment, what is asked for makes no sense, or the tasks that a run was begun
            with are no longer there.
        MissingError: there is no key for OpenReward.
    """
    from rlkit.envs.openreward.connection import sdk
    from rlkit.envs.openreward.connection.clients import Access
    from rlkit.envs.openreward.connection.secrets import secrets_of
    from rlkit.envs.openreward.connection.target import Target, parse_target
    from rlkit.envs.openreward.session import TimeLimits
    from rlkit.envs.openreward.settings import Settings
    from rlkit.envs.openreward.source import OpenRewardTasks

    if (target is None) == (server is None):
        raise UsageError("target or server: give one of them")
    if variant is not None and server is None:
        raise UsageError("variant has no effect on a target: write #variant at its end")
    reward = RewardRule(reward_reduction, nonterminal_reward, min_reward, max_reward)
    running: LocalServer | None = None
    if server is not None:
        from rlkit.envs.openreward.connection.servers import local_server

        running = local_server(server, within_s=start_timeout_s)
        target_server = Target("local", running.url, None if variant is None else variant.lower())
    else:
        target_server = parse_target(target or "")
    hosted = target_server.base_url is None
    if hosted and send_api_key:
        raise UsageError("send_api_key has no effect: OpenReward itself is always sent its key")
    sdk.load()
    known = secrets_of(secrets or {}, hosted=hosted)
    wanted = _splits(splits)
    listing = list_tasks(Access(target_server, send_api_key), wanted, limit_s=request_timeout_s)
    settings = Settings(
        access=listing.access,
        secrets=known,
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
    sizes = settle_sizes(listing, wanted or {}, seed=seed, limit_s=request_timeout_s, recorded=recorded, note=note)
    return OpenRewardTasks(sizes, partial(_tasks, wanted or {}, settings, running, seed), seed=seed)


def _splits(
    given: str | Sequence[str] | Mapping[str, Split | dict[str, JsonValue] | None] | None,
) -> dict[str, Split] | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        named = {
            name: value if isinstance(value, Split) else _split(name, value or {}) for name, value in given.items()
        }
    else:
        named = dict.fromkeys([given] if isinstance(given, str) else given, Split())
    if not named:
        raise UsageError("splits: name one at least, or leave it out")
    return named


def _split(name: str, given: Mapping[str, JsonValue]) -> Split:
    for key in given:
        if key not in _OF_SPLIT:
            known = ", ".join(_OF_SPLIT)
            raise UsageError(f"splits.{name}.{key}: unknown.{did_you_mean(key, _OF_SPLIT)} Known: {known}")
    shuffle, most, size = (given.get(key, default) for key, default in _OF_SPLIT.items())
    if not (isinstance(shuffle, bool) and _is_count(most) and _is_count(size)):
        raise UsageError(f"splits.{name}: shuffle is true or false, and num_samples and size are whole numbers")
    return Split(shuffle, most, size)


def _is_count(value: object) -> TypeGuard[int | None]:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _tasks(
    splits: Mapping[str, Split], settings: Settings, server: LocalServer | None, seed: int, sizes: Mapping[str, int]
) -> Sequence[OpenRewardTask]:
    from rlkit.envs.openreward.task import OpenRewardTask

    return [OpenRewardTask(split, index, settings, server) for split, index in choose_tasks(sizes, splits, seed=seed)]
