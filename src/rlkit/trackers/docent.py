# docent is optional and has no complete types.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingImports=false, reportUnknownParameterType=false
"""Docent of Transluce: each rollout as a transcript with metadata.

Invariant: transcripts and metadata contain only recorded data.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rlkit._util.files.json_fields import pick_rows
from rlkit._util.sections import Section
from rlkit.errors import MissingError, missing_extra
from rlkit.trackers.recorded_run import RecordedRollout, RecordedRun, RecordedStep
from rlkit.trackers.service import ServiceTracker
from rlkit.types import Json

if TYPE_CHECKING:
    from docent import Docent
    from docent.data_models import AgentRun
    from docent.data_models.chat import ChatMessage


class DocentSettings(Section):
    """Docent of Transluce: transcripts of rollouts, to read and search."""

    collection: str | None = None
    """Name of the collection to create for the run; null for the name of the run."""
    rollouts: Annotated[int, Field(ge=0)] = 0
    """Number of random rollouts of each step to send; 0 for all."""
    url: str | None = None
    """Address of your own Docent server; null for Transluce's."""


class DocentTracker(ServiceTracker[DocentSettings]):
    """Send a run's rollouts to a new collection."""

    name = "docent"
    settings_type = DocentSettings
    _client: Docent
    _collection: str
    _run: RecordedRun

    def require(self) -> None:  # noqa: D102  inherited
        if importlib.util.find_spec("docent") is None:
            raise missing_extra("docent")
        if not os.environ.get("DOCENT_API_KEY"):
            raise MissingError("track.docent: DOCENT_API_KEY is not set: set it, or leave track.docent out")

    def open(self, run: RecordedRun, state: Mapping[str, Json]) -> Mapping[str, Json]:  # noqa: D102  inherited
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # pydantic warns about docent's code
            from docent import Docent

        url, self._run = self.settings.url, run
        self._client = Docent(
            api_key=os.environ.get("DOCENT_API_KEY"), api_url=url, frontend_url=url, log_stream=io.StringIO()
        )
        if "collection" not in state:
            with redirect_stdout(sys.stderr):
                collection = self._client.create_collection(
                    name=self.settings.collection or run.name,
                    description=f"Rollouts of the rlkit run {run.name}",
                    metadata={"model": run.model, "lora_rank": run.lora_rank},
                )
            state = {"collection": collection}
        self._collection = str(state["collection"])
        return {"collection": self._collection}

    def show(self, step: RecordedStep) -> None:  # noqa: D102  inherited
        rollouts = step.sample_rollouts(self.settings.rollouts)
        runs = [agent_run(self._run, step.number, rollout) for rollout in rollouts if rollout.turns]
        if runs:
            with redirect_stderr(io.StringIO()):  # hide the progress bar
                self._client.add_agent_runs(self._collection, runs)


def agent_run(run: RecordedRun, step: int, rollout: RecordedRollout) -> AgentRun:
    """Convert a rollout to a Docent run with metadata."""
    from docent.data_models import AgentRun, Transcript

    last = rollout.turns[-1]
    labels = {
        "run": run.name,
        "model": run.model,
        "step": step,
        "environment": rollout.env,
        "task": rollout.task,
        "draw": rollout.draw,
        "member": rollout.member,
        "status": rollout.status,
        "reward": rollout.reward,
        "stop_reason": last.stop,
        "weights_version": last.version,
        "seconds": rollout.seconds,
        "metrics": dict(rollout.metrics),
        **({} if rollout.error is None else {"error": rollout.error}),
    }
    name = f"step {step} · {rollout.env} · {rollout.task} · {rollout.member}"
    return AgentRun(name=name, transcripts=[Transcript(messages=_messages(rollout))], metadata=labels)


def _messages(rollout: RecordedRollout) -> list[ChatMessage]:
    """Return the messages recorded by the environment, or the turns as raw text if there are none."""
    if recorded := pick_rows(rollout.info, "messages"):
        return list(map(_message, recorded))
    turns = [(("user", turn.prompt), ("assistant", turn.completion)) for turn in rollout.turns]
    return [
        _message({"role": role, "content": text}) for turn in turns for role, text in turn if text or role != "user"
    ]


def _message(message: Mapping[str, Any]) -> ChatMessage:
    from docent.data_models.chat import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage

    text = message.get("content", "")
    text = text if isinstance(text, str) else json.dumps(text)
    match message.get("role"):
        case "system":
            return SystemMessage(content=text)
        case "tool":
            return ToolMessage(content=text, tool_call_id=str(message.get("tool_call_id", "")))
        case "assistant":
            thinking = message.get("thinking")
            calls = [
                ToolCall(id=str(call["id"]), function=str(call["name"]), arguments=dict(call["arguments"]))
                for call in message.get("tool_calls", [])
            ]
            content = f"<think>{thinking}</think>\n{text}" if thinking else text
            return AssistantMessage(content=content, tool_calls=calls or None)
        case _:
            return UserMessage(content=text)
