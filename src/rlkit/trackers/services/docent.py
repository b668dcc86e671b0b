# docent is optional and has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingImports=false, reportUnknownParameterType=false
"""Docent of Transluce: each rollout as a transcript, labelled with where it comes from.

Invariant: a transcript is what the model was given and said; the labels are what the run recorded of it.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any, cast

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic, about how docent is written
    from docent import Docent
    from docent.data_models import AgentRun, Transcript
    from docent.data_models.chat import AssistantMessage, SystemMessage, ToolCall, ToolMessage, UserMessage

from rlkit.trackers.feed import Rollout, Step, Told
from rlkit.trackers.services.sampled import drawn_from

if TYPE_CHECKING:
    from docent.data_models.chat import ChatMessage

    from rlkit.types import Json


class DocentSink:
    """Sends a run's rollouts to a collection of its own.

    Args:
        collection: its name; None for the run's.
        rollouts: of each step that are sent; 0 for all.
        url: of a server of one's own; None for Transluce's.
    """

    def __init__(self, *, collection: str | None, rollouts: int, url: str | None) -> None:
        self._name = collection
        self._rollouts = rollouts
        self._url = url
        self._client: Docent | None = None
        self._collection = ""
        self._run: Told | None = None

    def open(self, run: Told, state: Mapping[str, Json]) -> Mapping[str, Json]:  # noqa: D102  of the protocol
        self._run = run
        self._client = Docent(
            api_key=os.environ.get("DOCENT_API_KEY"),
            api_url=self._url,
            frontend_url=self._url,
            log_stream=io.StringIO(),
        )
        known = state.get("collection")
        self._collection = str(known) if known else self._made(self._client, run)
        return {"collection": self._collection}

    def step(self, step: Step) -> None:  # noqa: D102  of the protocol
        assert self._client is not None  # opened before
        assert self._run is not None
        drawn = drawn_from(step.rollouts(), self._rollouts, step.number)
        runs = [agent_run(self._run, step.number, one) for one in drawn if one.turns]
        if runs:
            with redirect_stderr(io.StringIO()):  # its bar of progress
                self._client.add_agent_runs(self._collection, runs)

    def close(self, status: str) -> None:
        """Nothing: what was sent is there."""

    def _made(self, client: Docent, run: Told) -> str:
        with redirect_stdout(sys.stderr):
            return client.create_collection(
                name=self._name or run.name,
                description=f"Rollouts of the rlkit run {run.name}",
                metadata={"model": run.model, "lora_rank": run.lora_rank},
            )


def agent_run(run: Told, step: int, rollout: Rollout) -> AgentRun:
    """A rollout as Docent has it: with run, step, environment, reward, stop reason and version of the weights."""
    last = rollout.turns[-1]
    labels: dict[str, Any] = {
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


def _messages(rollout: Rollout) -> list[ChatMessage]:
    """What was said: the messages that the environment recorded, or else the turns as the model had them."""
    recorded = rollout.info.get("messages")
    if isinstance(recorded, Sequence) and not isinstance(recorded, str) and recorded:
        return [_message(cast("Mapping[str, Any]", one)) for one in recorded]
    said = list[Any]()
    for turn in rollout.turns:
        said += [UserMessage(content=turn.prompt)] if turn.prompt else []
        said.append(AssistantMessage(content=turn.completion))
    return said


def _message(message: Mapping[str, Any]) -> ChatMessage:
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
            shown = f"<think>{thinking}</think>\n{text}" if thinking else text
            return AssistantMessage(content=shown, tool_calls=calls or None)
        case _:
            return UserMessage(content=text)
