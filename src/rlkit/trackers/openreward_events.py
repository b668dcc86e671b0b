"""What OpenReward is told of a rollout, and how it is sent.

Invariant: what `Service.send` has returned from was taken. The events of an episode have the same ids each time that
they are made, so that what is sent twice can be told.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import NAMESPACE_URL, uuid5

from rlkit.errors import RlkitError

if TYPE_CHECKING:
    from typing import Self

    import httpx

    from rlkit.types import Episode, Group

SESSION = "openreward"
"""What episodes of OpenReward's environments have in their record: of which environment, split and task they are."""

_REQUEST_S = 30.0
_BATCH_EVENTS = 128
_BATCH_BYTES = 1_000_000
_UNFIT = frozenset({400, 413, 422})

type Event = dict[str, Any]


class UploadFailed(RlkitError):
    """OpenReward did not take a rollout. It is in the run's folder.

    Args:
        message: what came back.
        unfit: it is about this rollout alone, and sending it again would not help.
    """

    def __init__(self, message: str, *, unfit: bool = False) -> None:
        super().__init__(message)
        self.unfit = unfit


@dataclass(frozen=True, slots=True)
class About:
    """What all rollouts of a run have in common.

    Args:
        run: its name.
        model: that is trained.
        place: of the run; with its name it makes the ids of events.
    """

    run: str
    model: str
    place: str


@dataclass(slots=True)
class Service:
    """OpenReward's service for rollouts, through a connection of its own.

    The SDK's client is not used to send: it does not tell whether a rollout was taken, and waits without a limit.
    """

    http: httpx.Client
    _ids: dict[str, str | None] = field(default_factory=dict[str, "str | None"])

    @classmethod
    def connect(cls) -> Self:
        """With the address and the key that the SDK would use."""
        import httpx

        from rlkit.envs.openreward.connection import sdk

        sdk.load()
        from openreward import OpenReward

        client = OpenReward()
        return cls(httpx.Client(base_url=client.base_url, headers={"x-api-key": client.api_key}, timeout=_REQUEST_S))

    def send(self, events: Sequence[Event]) -> None:
        """Send events, in their order.

        Raises:
            UploadFailed: they were not all taken.
        """
        import httpx

        for body in _batches(events):
            try:
                answer = self.http.post("/v1/rollouts", content=body, headers={"content-type": "application/json"})
            except httpx.HTTPError as error:
                raise UploadFailed(f"there was no answer ({type(error).__name__})") from error
            if not answer.is_success:
                raise UploadFailed(f"HTTP {answer.status_code}", unfit=answer.status_code in _UNFIT)

    def environment_id(self, name: str) -> str | None:
        """What the platform calls an environment; None if it does not say, which a rollout can do without."""
        import httpx

        if name not in self._ids:
            self._ids[name] = None
            with suppress(httpx.HTTPError, ValueError, AttributeError):
                found = cast("object", self.http.get(f"/v1/environments/{name}").raise_for_status().json().get("id"))
                self._ids[name] = found if isinstance(found, str) else None
        return self._ids[name]

    def close(self) -> None:
        """Close the connection."""
        self.http.close()


def _batches(events: Sequence[Event]) -> Iterator[bytes]:
    held, size = list[bytes](), 0
    for event in events:
        piece = json.dumps(event, ensure_ascii=False).encode()
        if held and (len(held) == _BATCH_EVENTS or size + len(piece) > _BATCH_BYTES):
            yield _body(held)
            held, size = [], 0
        held.append(piece)
        size += len(piece)
    if held:
        yield _body(held)


def _body(pieces: Sequence[bytes]) -> bytes:
    return b'{"events":[' + b",".join(pieces) + b"]}"


def upload(service: Service, about: About, group: Group, episode: Episode, *, step: int) -> None:
    """Upload an episode of an OpenReward environment.

    Args:
        service: takes it.
        about: the run.
        group: that it is of.
        episode: with a record of its session.
        step: that was trained on it.

    Raises:
        UploadFailed: it was not taken.
    """
    session = cast("Mapping[str, Any]", episode.info[SESSION])
    hosted = session["hosted"]
    environment_id = service.environment_id(session["target"]) if hosted else None
    started, *rest = _events(about, group, episode, step=step, environment_id=environment_id)
    service.send([started])  # by itself, as the SDK does it: the others name it
    service.send(rest)


def _events(about: About, group: Group, episode: Episode, *, step: int, environment_id: str | None) -> Iterator[Event]:
    from openreward import RolloutInfo, RunInfo
    from openreward.models import LogMessageEvent, RolloutConfig, RolloutStartedEvent, RolloutUpdateEvent

    session = cast("Mapping[str, Any]", episode.info[SESSION])
    place = f"{about.place}/{about.run}/{step}/{group.draw}/{episode.member}"
    now_ms = round(time.time() * 1000)
    rollout = str(uuid5(NAMESPACE_URL, place))
    run = RunInfo(about.model, run_type="train", training_stage="rl", peft_type="lora", framework="rlkit")
    config = RolloutConfig(
        run_name=about.run,
        rollout_name=f"step {step} · {group.task} · {episode.member}",
        environment=session["target"] if session["hosted"] else None,
        variant=session["variant"],
        split=session["split"],
        metadata={"env": group.env, "draw": group.draw, "member": episode.member, "ended": episode.info.get("ended")},
        run_info=asdict(run),
    )
    yield _wire(RolloutStartedEvent.from_config(rollout, now_ms, config, step=step, environment_id=environment_id))
    items = list(_items(cast("Sequence[Mapping[str, Any]]", episode.info["messages"])))
    for index, item in enumerate(items):
        last = index == len(items) - 1
        yield _wire(
            LogMessageEvent(
                eventId=str(uuid5(NAMESPACE_URL, f"{place}/{index}")),
                timestamp=now_ms,
                index=index,
                rolloutEventId=rollout,
                type=item.kind,
                content=item.content,
                name=item.name,
                callId=item.call_id,
                environment_id=environment_id,
                reward=episode.reward if last else None,
                isFinished=last,
                metadata={},
            )
        )
    told = RolloutInfo(task_index=session["index"], current_step=step, duration_ms=round(episode.seconds * 1000))
    yield _wire(RolloutUpdateEvent(rollout, now_ms, asdict(told)))


type _Kind = Literal["system_message", "user_message", "assistant_message", "reasoning", "tool_call", "tool_result"]


@dataclass(frozen=True, slots=True)
class _Item:
    kind: _Kind
    content: str
    name: str | None = None
    call_id: str | None = None


def _items(messages: Sequence[Mapping[str, Any]]) -> Iterator[_Item]:
    """Messages as OpenReward has them: what a tool was called with, and what it said, stand by themselves."""
    for message in messages:
        text = str(message["content"])
        match message["role"]:
            case "system":
                yield _Item("system_message", text)
            case "user":
                yield _Item("user_message", text)
            case "tool":
                yield _Item("tool_result", text, call_id=str(message.get("tool_call_id", "")))
            case _:
                if message.get("thinking"):
                    yield _Item("reasoning", str(message["thinking"]))
                if text:
                    yield _Item("assistant_message", text)
                for call in message.get("tool_calls", []):
                    yield _Item("tool_call", json.dumps(call["arguments"]), call["name"], call["id"])


def _wire(event: object) -> Event:
    return cast("Event", _without_none(asdict(cast("Any", event))))


def _without_none(value: object) -> object:
    if not isinstance(value, dict):
        return value
    named = cast("dict[str, object]", value)
    return {key: _without_none(inner) for key, inner in named.items() if inner is not None}
