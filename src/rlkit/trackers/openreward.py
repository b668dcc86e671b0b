"""Upload of rollouts to OpenReward.

    rlkit.train("config.yaml", trackers=[ConsoleTracker(), OpenRewardTracker()])

Only episodes of OpenReward environments are uploaded. They are read from the run's tables, so a resumed run uploads
missing episodes.

Invariant: an upload never fails the run, and delays only its end, by at most `last_s` seconds. At most one step is held
in memory. An episode counts as uploaded only after the service accepted it. The ids of an episode's events are
deterministic, so the service can recognise duplicates.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast
from uuid import NAMESPACE_URL, uuid5

from rlkit._util import files
from rlkit.errors import MissingError, RlkitError
from rlkit.trackers import RunInfo, RunResult, Tracker
from rlkit.trackers.recorded_run import RecordedRollout, read_rollouts

if TYPE_CHECKING:
    import httpx
    from _typeshed import DataclassInstance

PROGRESS = "openreward.json"
"""File with the progress of uploads, in the run's folder."""

SESSION = "openreward"
"""Key of an episode's info that holds its OpenReward environment, split and task."""

_KEY = "OPENREWARD_API_KEY"
_POLL_S = 0.5
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0
_LAST_S = 30.0
_REQUEST_S = 30.0
_BATCH_EVENTS = 128
_BATCH_BYTES = 1_000_000
_PERMANENT_ERRORS = frozenset({400, 413, 422})

type Event = dict[str, Any]


class UploadFailed(RlkitError):
    """OpenReward did not accept a rollout; if `is_permanent`, retries are useless. The run's folder is complete."""

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


class OpenRewardTracker(Tracker):
    """Upload the rollouts of each step after its table is written.

    Args:
        run_name: name of the run on OpenReward; the rlkit run's name by default.
        last_s: seconds that the end of the run waits for unfinished uploads.

    Raises:
        MissingError: OPENREWARD_API_KEY is not set.
    """

    def __init__(self, *, run_name: str | None = None, last_s: float = _LAST_S) -> None:
        if not os.environ.get(_KEY):
            raise MissingError(f"{_KEY} is not set: set it, or leave out the uploads to OpenReward")
        self._run_name = run_name
        self._last_s = last_s
        self._ending = threading.Event()
        self._stepped = threading.Event()
        self._failure: UploadFailed | None = None
        self._newest = 0
        self._thread: threading.Thread | None = None

    def on_start(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._newest = max(self._newest, run.progress().step)
        args = (run, self._run_name or run.name)
        self._thread = threading.Thread(target=self._work, args=args, name="rlkit-openreward-uploads", daemon=True)
        self._thread.start()

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Start the upload of a step; UploadFailed if the upload of an earlier step failed."""
        self._newest = max(self._newest, step)
        self._stepped.set()
        if self._failure is not None:
            raise self._failure

    def on_finish(self, result: RunResult | None) -> None:
        """Wait for unfinished uploads, for a limited time; UploadFailed if a rollout could not be uploaded."""
        self._ending.set()
        self._stepped.set()
        if self._thread is not None:
            self._thread.join(self._last_s)
            if self._thread.is_alive() and self._failure is None:
                raise UploadFailed(
                    "the upload of the last rollouts to OpenReward was too slow; resume the run to retry"
                )
        if self._failure is not None:
            raise self._failure

    def _work(self, run: RunInfo, name: str) -> None:
        from rlkit.store.history import table_path

        pause_s = _FIRST_PAUSE_S
        while True:
            ending = self._ending.is_set()
            before, uploaded = _read_progress(run.directory)
            table = table_path(run.directory, before + 1)
            if before >= self._newest or not table.exists():  # tables are written in the background
                if ending:
                    return
                self._stepped.wait(_POLL_S)
                self._stepped.clear()
                continue
            try:
                self._upload(run, name, table, step=before + 1, uploaded=uploaded)
                pause_s = _FIRST_PAUSE_S
            except Exception as error:  # an upload must not end the run
                self._failure = UploadFailed(
                    f"the rollouts of step {before + 1} could not be uploaded to OpenReward: "
                    f"{str(error) or type(error).__name__}; the upload is retried, also after the run is resumed"
                )
                if ending:
                    return
                self._ending.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _upload(self, run: RunInfo, name: str, table: Path, *, step: int, uploaded: int) -> None:
        """Upload the rollouts of a step, except the first `uploaded`."""
        rollouts = [rollout for rollout in read_rollouts(table) if SESSION in rollout.info]
        if len(rollouts) > uploaded:
            service = Service.connect()
            with service.http:
                for number, rollout in enumerate(rollouts[uploaded:], uploaded + 1):
                    try:
                        service.upload(run, name, rollout, step=step)
                    except UploadFailed as error:
                        if not error.is_permanent:
                            raise
                        self._failure = UploadFailed(f"OpenReward rejected a rollout of step {step}: {error}")
                    _write_progress(run.directory, step - 1, number)
        _write_progress(run.directory, step, 0)


def _read_progress(directory: Path) -> tuple[int, int]:
    """Return the last completely uploaded step (0 for none), and the number of uploaded rollouts of the next step."""
    try:
        record = json.loads((directory / PROGRESS).read_text())
        return int(record["step"]), int(record["rollouts"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0


def _write_progress(directory: Path, step: int, rollouts: int) -> None:
    files.write_text(directory / PROGRESS, json.dumps({"step": step, "rollouts": rollouts}) + "\n")


@dataclass(slots=True)
class Service:
    """Client of OpenReward's rollout service.

    The SDK's client is not used to send, because it does not report failures and waits without a limit.
    """

    http: httpx.Client
    _environment_ids: dict[str, str | None] = field(default_factory=dict[str, "str | None"])

    @classmethod
    def connect(cls) -> Self:
        """Connect with the SDK's address and key."""
        import httpx

        from rlkit.envs.openreward.connection import sdk

        sdk.load()
        from openreward import OpenReward

        client = OpenReward()
        return cls(httpx.Client(base_url=client.base_url, headers={"x-api-key": client.api_key}, timeout=_REQUEST_S))

    def upload(self, run: RunInfo, name: str, rollout: RecordedRollout, *, step: int) -> None:
        """Upload an episode of an OpenReward environment; `name` is the run's name on OpenReward."""
        session = cast("Mapping[str, Any]", rollout.info[SESSION])
        environment_id = self._environment_id(session["target"]) if session["hosted"] else None
        started, *rest = _events(run, name, rollout, step=step, environment_id=environment_id)
        self.send([started])  # separately, as the SDK does: the other events refer to it
        self.send(rest)

    def send(self, events: Sequence[Event]) -> None:
        """Send events in order; UploadFailed if the service did not accept all of them."""
        import httpx

        for body in _batches(events):
            try:
                answer = self.http.post("/v1/rollouts", content=body, headers={"content-type": "application/json"})
            except httpx.HTTPError as error:
                raise UploadFailed(f"no response ({type(error).__name__})") from error
            if not answer.is_success:
                is_permanent = answer.status_code in _PERMANENT_ERRORS
                raise UploadFailed(f"HTTP {answer.status_code}", is_permanent=is_permanent)

    def _environment_id(self, name: str) -> str | None:
        """Return OpenReward's id of an environment; None if the request fails, because the id is optional."""
        import httpx

        if name not in self._environment_ids:
            self._environment_ids[name] = None
            with suppress(httpx.HTTPError, ValueError, AttributeError):
                identity: object = self.http.get(f"/v1/environments/{name}").raise_for_status().json().get("id")
                self._environment_ids[name] = identity if isinstance(identity, str) else None
        return self._environment_ids[name]


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
    run: RunInfo, name: str, rollout: RecordedRollout, *, step: int, environment_id: str | None
) -> Iterator[Event]:
    import openreward
    from openreward.models import LogMessageEvent, RolloutConfig, RolloutStartedEvent, RolloutUpdateEvent

    session = cast("Mapping[str, Any]", rollout.info[SESSION])
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
