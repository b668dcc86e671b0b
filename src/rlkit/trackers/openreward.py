"""Upload of rollouts to OpenReward.

Only episodes of OpenReward environments are uploaded.

Invariant: an episode counts as uploaded only after the service accepted it. The ids of an episode's events are
deterministic, so the service can recognise duplicates.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import NAMESPACE_URL, uuid5

from rlkit._util.files.json_fields import pick
from rlkit._util.sections import Section
from rlkit.errors import MissingError, RlkitError
from rlkit.trackers.recorded_run import RecordedRollout, RecordedRun, RecordedStep
from rlkit.trackers.service import ServiceTracker
from rlkit.types import Json

if TYPE_CHECKING:
    import httpx
    from _typeshed import DataclassInstance

SESSION = "openreward"  # key of an episode's info that holds its OpenReward environment, split and task
_KEY = "OPENREWARD_API_KEY"
_REQUEST_S = 30.0
_BATCH_EVENTS = 128
_BATCH_BYTES = 1_000_000
_PERMANENT_ERRORS = frozenset({400, 413, 422})

type Event = dict[str, Any]


class UploadRejected(RlkitError):
    """OpenReward rejected rollouts as invalid, so retries are useless. The run's folder is complete."""


class OpenRewardSettings(Section):
    """OpenReward: the rollouts of its environments."""

    name: str | None = None
    """Name of the run at OpenReward; null for the name of the rlkit run."""


class OpenRewardTracker(ServiceTracker[OpenRewardSettings]):
    """Upload the rollouts of OpenReward's environments. Rollouts that the service rejects as invalid are skipped."""

    name = "openreward"
    settings_type = OpenRewardSettings

    def require(self) -> None:  # noqa: D102  inherited
        if not os.environ.get(_KEY):
            raise MissingError(f"{_KEY} is not set: set it, or leave out the uploads to OpenReward")

    def open(self, run: RecordedRun, state: Mapping[str, Json]) -> Mapping[str, Json]:  # noqa: D102  inherited
        self._run, self._uploaded, self._rejections = run, set[tuple[int, int]](), list[str]()
        return {}

    def show(self, step: RecordedStep) -> None:
        """Upload the rollouts of a step, except those that an earlier attempt uploaded."""
        import httpx

        name = self.settings.name or self._run.name
        rollouts = [rollout for rollout in step.rollouts() if SESSION in rollout.info]
        with connect() as http:
            find_id = cache(partial(_find_environment_id, http))
            for rollout in rollouts:
                if (rollout.draw, rollout.member) in self._uploaded:
                    continue
                started, *rest = _events(self._run, name, rollout, step=step.number, find_id=find_id)
                try:
                    post_events(http, [started])  # separately, as the SDK does: the other events refer to it
                    post_events(http, rest)
                except httpx.HTTPStatusError as error:
                    if error.response.status_code not in _PERMANENT_ERRORS:
                        raise
                    self._rejections.append(f"a rollout of step {step.number}: HTTP {error.response.status_code}")
                self._uploaded.add((rollout.draw, rollout.member))
        self._uploaded.clear()

    def close(self, status: str) -> None:
        """Raise UploadRejected if a rollout was rejected."""
        if self._rejections:
            raise UploadRejected(f"OpenReward rejected {'; '.join(self._rejections)}")


@contextmanager
def connect() -> Generator[httpx.Client]:
    """Connect to OpenReward's rollout service with the SDK's address and key.

    The SDK's client is not used to send, because it does not report failures and waits without a limit.
    """
    import httpx

    from rlkit.envs.openreward.connection import sdk

    sdk.load()
    from openreward import OpenReward

    client = OpenReward()
    headers = {"x-api-key": client.api_key}
    with httpx.Client(base_url=client.base_url, headers=headers, timeout=_REQUEST_S) as http:
        yield http


def post_events(http: httpx.Client, events: Sequence[Event]) -> None:
    """Send events in order; raise an HTTPError of httpx if the service did not accept all of them."""
    for body in _batches(events):
        http.post("/v1/rollouts", content=body, headers={"content-type": "application/json"}).raise_for_status()


def _find_environment_id(http: httpx.Client, name: str) -> str | None:
    """Return OpenReward's id of an environment; None if the request fails, because the id is optional."""
    import httpx

    with suppress(httpx.HTTPError, ValueError):
        return pick(http.get(f"/v1/environments/{name}").raise_for_status().json(), "id", str)
    return None


def _batches(events: Sequence[Event]) -> Iterator[bytes]:
    """Yield request bodies of at most `_BATCH_EVENTS` events and `_BATCH_BYTES` bytes; a larger event is sent alone."""
    batch = list[bytes]()
    for event in events:
        text = json.dumps(event, ensure_ascii=False).encode()
        if batch and (len(batch) == _BATCH_EVENTS or sum(map(len, batch)) + len(text) > _BATCH_BYTES):
            yield b'{"events":[' + b",".join(batch) + b"]}"
            batch = []
        batch.append(text)
    if batch:
        yield b'{"events":[' + b",".join(batch) + b"]}"


def _events(
    run: RecordedRun, name: str, rollout: RecordedRollout, *, step: int, find_id: Callable[[str], str | None]
) -> Iterator[Event]:
    """Yield the events of a rollout; `name` is the run's name on OpenReward."""
    import openreward
    from openreward.models import LogMessageEvent, RolloutConfig, RolloutStartedEvent, RolloutUpdateEvent

    session = cast("Mapping[str, Any]", rollout.info[SESSION])
    environment_id = find_id(session["target"]) if session["hosted"] else None
    place = f"{run.directory}/{name}/{step}/{rollout.draw}/{rollout.member}"
    identity = str(uuid5(NAMESPACE_URL, place))
    now_ms = round(time.time() * 1000)
    about = openreward.RunInfo(run.model, run_type="train", training_stage="rl", peft_type="lora", framework="rlkit")
    metadata = {"env": rollout.env, "draw": rollout.draw, "member": rollout.member, "ended": rollout.info.get("ended")}
    config = RolloutConfig(
        run_name=name,
        rollout_name=f"step {step} · {rollout.task} · {rollout.member}",
        environment=session["target"] if session["hosted"] else None,
        variant=session["variant"],
        split=session["split"],
        metadata=_without_none(metadata.items()),
        run_info=_to_json(about),
    )
    yield _to_json(RolloutStartedEvent.from_config(identity, now_ms, config, step=step, environment_id=environment_id))
    items = list(_items(cast("Sequence[Mapping[str, Any]]", rollout.info["messages"])))
    for index, (kind, content, tool, call_id) in enumerate(items):
        last = index == len(items) - 1
        yield _to_json(
            LogMessageEvent(
                eventId=str(uuid5(NAMESPACE_URL, f"{place}/{index}")),
                timestamp=now_ms,
                index=index,
                rolloutEventId=identity,
                type=kind,
                content=content,
                name=tool,
                callId=call_id,
                environment_id=environment_id,
                reward=rollout.reward if last else None,
                isFinished=last,
                metadata={},
            )
        )
    duration_ms = round(rollout.seconds * 1000)
    info = openreward.RolloutInfo(task_index=session["index"], current_step=step, duration_ms=duration_ms)
    yield _to_json(RolloutUpdateEvent(identity, now_ms, _to_json(info)))


type _Kind = Literal["system_message", "user_message", "assistant_message", "reasoning", "tool_call", "tool_result"]


def _items(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[_Kind, str, str | None, str | None]]:
    """Yield kind, content, tool name and call id; tool calls and tool results are items of their own."""
    for message in messages:
        text = str(message["content"])
        match message["role"]:
            case "system":
                yield "system_message", text, None, None
            case "user":
                yield "user_message", text, None, None
            case "tool":
                yield "tool_result", text, None, str(message.get("tool_call_id", ""))
            case _:
                if message.get("thinking"):
                    yield "reasoning", str(message["thinking"]), None, None
                if text:
                    yield "assistant_message", text, None, None
                for call in message.get("tool_calls", []):
                    yield "tool_call", json.dumps(call["arguments"]), call["name"], call["id"]


def _to_json(event: DataclassInstance) -> Event:
    return asdict(event, dict_factory=_without_none)


def _without_none(entries: Iterable[tuple[str, Any]]) -> Event:
    return {key: value for key, value in entries if value is not None}
