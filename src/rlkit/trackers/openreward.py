"""Uploads of rollouts to OpenReward.

    rlkit.train("config.yaml", trackers=[ConsoleTracker(), OpenRewardTracker()])

Only episodes of OpenReward's environments are uploaded: they have the conversation in their record. What is uploaded is
read from the run's own tables, so that it is on this machine first, and a resumed run uploads what is missing.

Invariant: the run never waits for an upload, nor fails for one; at its end it waits for `last_s` seconds at most. No
more than one step is held in memory.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlkit import atomic
from rlkit.errors import MissingError, RlkitError
from rlkit.trackers import Checkpoint, RunInfo, RunResult, Tracker

if TYPE_CHECKING:
    from openreward import OpenReward

    from rlkit.types import Episode, Group

PROGRESS = "openreward.json"
"""Of a run's folder: the last step that was uploaded."""

_KEY = "OPENREWARD_API_KEY"
_POLL_S = 0.5
_MOST_FAILURES = 3
_LAST_S = 30.0


class UploadFailed(RlkitError):
    """OpenReward did not take the rollouts of a step. They are in the run's folder."""


class OpenRewardTracker(Tracker):
    """Uploads each step's rollouts once their table is written.

    Args:
        run_name: on OpenReward; the run's own by default.
        last_s: seconds that the end of the run waits for what is not uploaded yet.

    Raises:
        MissingError: there is no key.
    """

    def __init__(self, *, run_name: str | None = None, last_s: float = _LAST_S) -> None:
        if not os.environ.get(_KEY):
            raise MissingError(f"{_KEY} is not set: uploads to OpenReward need it; set it, or leave them out")
        self._run_name = run_name
        self._last_s = last_s
        self._ending = threading.Event()
        self._stepped = threading.Event()
        self._failure: UploadFailed | None = None
        self._told = False
        self._newest = 0
        self._thread: threading.Thread | None = None

    def started(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._newest = max(self._newest, run.progress().step)
        name = self._run_name or run.name
        self._thread = threading.Thread(
            target=self._work, args=(run.directory, name, run.model), name="rlkit-openreward-uploads", daemon=True
        )
        self._thread.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done.

        Raises:
            UploadFailed: an earlier one could not be uploaded; told once.
        """
        self._newest = max(self._newest, step)
        self._stepped.set()
        self._tell()

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Nothing to upload."""

    def note(self, message: str) -> None:
        """Nothing to upload."""

    def finished(self, result: RunResult | None) -> None:
        """Wait for what is left, for a while.

        Raises:
            UploadFailed: something could not be uploaded; told once.
        """
        self._ending.set()
        self._stepped.set()
        if self._thread is not None:
            self._thread.join(self._last_s)
        self._tell()

    def _tell(self) -> None:
        if self._failure is not None and not self._told:
            self._told = True
            raise self._failure

    def _work(self, directory: Path, name: str, model: str) -> None:
        from rlkit.store.history import table_path

        done, failures = _uploaded(directory), 0
        while failures < _MOST_FAILURES:
            ending = self._ending.is_set()
            path = table_path(directory, done + 1)
            if done >= self._newest or not path.exists():  # tables are written behind the run's back
                if ending:
                    return
                self._stepped.wait(_POLL_S)
                self._stepped.clear()
                continue
            try:
                _upload(path, name, model, step=done + 1)
            except Exception as error:  # whatever it is, the run goes on
                failures += 1
                self._failure = UploadFailed(
                    f"the rollouts of step {done + 1} could not be uploaded to OpenReward: {type(error).__name__}: "
                    f"{error}; a resumed run tries again"
                )
                self._ending.wait(_POLL_S * 2**failures)
                continue
            failures = 0
            done += 1
            atomic.write_text(directory / PROGRESS, json.dumps({"uploaded_step": done}) + "\n")


def _uploaded(directory: Path) -> int:
    """The last step that was uploaded, 0 for none."""
    try:
        found = cast("Mapping[str, object]", json.loads((directory / PROGRESS).read_text()))
        step = found["uploaded_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return step if isinstance(step, int) else 0


def _upload(path: Path, name: str, model: str, *, step: int) -> None:
    """Upload the episodes of a table.

    Raises:
        UploadFailed: OpenReward takes none.
    """
    from rlkit.envs.openreward import sdk
    from rlkit.store.history import read_groups

    groups = [one.group for one in read_groups(path)]
    shown = [(group, episode) for group in groups for episode in group.episodes if "messages" in episode.info]
    if not shown:
        return
    sdk.load()
    from openreward import OpenReward, RunInfo

    client = OpenReward(
        run_info=RunInfo(model_name=model, run_type="train", training_stage="rl", peft_type="lora", framework="rlkit")
    )
    try:
        for group, episode in shown:
            _upload_episode(client, name, group, episode, step=step)
    finally:
        client.rollout.close()  # it waits until all is sent, or some seconds have passed


def _upload_episode(client: OpenReward, name: str, group: Group, episode: Episode, *, step: int) -> None:
    from openreward import RolloutInfo

    label, split, index = group.task.rsplit("/", 2)
    target, _, variant = label.partition("#")
    rollout = client.rollout.create(
        run_name=name,
        rollout_name=f"step {step} · {group.task} · {episode.member}",
        environment=target if "/" in target else None,
        variant=variant or None,
        split=split,
        metadata={"env": group.env, "draw": group.draw, "member": episode.member, "ended": episode.info.get("ended")},
    )
    if getattr(rollout, "_rollouts_disabled", False):
        raise UploadFailed("it was refused, or there was no answer")
    about = RolloutInfo(task_index=int(index), current_step=step, duration_ms=round(episode.seconds * 1000))
    items = _items(cast("Sequence[Mapping[str, Any]]", episode.info["messages"]))
    for place, item in enumerate(items, 1):
        last = place == len(items)
        rollout.log(
            item,
            reward=episode.reward if last else None,
            is_finished=last,
            rollout_info=about if last else None,
        )


def _items(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Messages as OpenReward has them: what a tool was called with, and what it said, stand by themselves."""
    from openreward import AssistantMessage, ReasoningItem, SystemMessage, ToolCall, ToolResult, UserMessage

    items = list[Any]()
    for message in messages:
        text = str(message["content"])
        match message["role"]:
            case "system":
                items.append(SystemMessage(content=text))
            case "user":
                items.append(UserMessage(content=text))
            case "tool":
                items.append(ToolResult(content=text, call_id=str(message.get("tool_call_id", ""))))
            case _:
                if message.get("thinking"):
                    items.append(ReasoningItem(content=str(message["thinking"])))
                if text:
                    items.append(AssistantMessage(content=text))
                items += [
                    ToolCall(name=call["name"], content=json.dumps(call["arguments"]), call_id=call["id"])
                    for call in message.get("tool_calls", [])
                ]
    return items
