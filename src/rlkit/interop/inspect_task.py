# inspect_ai is optional, so that type checkers do not know it.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false, reportUntypedFunctionDecorator=false
"""An rlkit environment as a task of inspect_ai.

Invariant: the score of a sample is the outcome of its episode. A sample without an outcome has an error or no score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, override

from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput, get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver
from inspect_ai.tool import ToolInfo
from inspect_ai.util import LimitExceededError
from pydantic import TypeAdapter

from rlkit.errors import ContextFull, EnvironmentFault, LimitReached
from rlkit.evaluation.openai_endpoint import read_reply
from rlkit.interop import MAX_TOKENS, as_chat, name_tasks
from rlkit.policy import ChatRequest, Limits, Policy, Reply, SampleRequest
from rlkit.rollout.validation import as_outcome
from rlkit.tasks.sources import Tasks
from rlkit.types import Message, Sampling


def inspect_task(tasks: Tasks, *, metrics: Sequence[str] = ()) -> Task:
    """Return a task of inspect: a sample is a task, its score the reward, with the outcome as metadata.

    Args:
        metrics: metrics of the outcome to score, too; one that an outcome lacks is unscored.

    Raises:
        UsageError: a task is no env, or scores its episodes as a group.
    """
    envs = name_tasks(tasks)

    @solver(name="rlkit")
    def play_sample() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            env = envs[str(state.sample_id)]
            outcome = as_outcome(await env.rollout(_InspectPolicy(state)), env=type(env).__name__)
            state.store.set("rlkit", asdict(outcome))
            return state

        return solve

    @scorer(name="rlkit", metrics={"*": [mean(), stderr()]})
    def score_outcome() -> Scorer:
        async def score(state: TaskState, target: Target) -> Score:
            if (outcome := state.store.get("rlkit")) is None:
                return Score.unscored(reason="the episode ended without an outcome")
            values = {name: outcome["metrics"].get(name, math.nan) for name in metrics}
            return Score(value={**values, "reward": outcome["reward"]}, metadata=outcome)

        return score

    samples = [Sample(id=name, input=str(getattr(env, "content", name))) for name, env in envs.items()]
    return Task(dataset=MemoryDataset(samples), solver=play_sample(), scorer=score_outcome())


class _InspectPolicy(Policy):
    """Policy of an episode over the evaluated model, for evaluation only; the sample shows the last conversation."""

    def __init__(self, state: TaskState) -> None:
        self._model = get_model()
        super().__init__(sampling=Sampling(self._model.config.max_tokens or MAX_TOKENS), limits=Limits())
        self._state = state
        self._replies: list[tuple[Message, ChatMessage]] = []

    @override
    async def _respond(self, request: SampleRequest | ChatRequest) -> Reply:
        chat = as_chat(request)
        messages = [self._encode(message) for message in chat.messages]
        tools = [ToolInfo.model_validate(dict(tool)) for tool in chat.tools]
        config = GenerateConfig(max_tokens=chat.max_tokens, temperature=chat.temperature)
        try:
            output = await self._model.generate(messages, tools, config=config)
        except LimitExceededError as error:
            raise LimitReached(str(error)) from error
        if not output.choices:
            raise EnvironmentFault(f"the model returned no reply: {output.error}")
        self._state.messages, self._state.output = [*messages, output.message], output
        if output.stop_reason == "model_length":
            raise ContextFull("the context of the model has no room for a reply")
        reply = read_reply(_as_openai(output), None)
        reply = replace(reply, turn=replace(reply.turn, role=request.role))
        self._replies.append((reply.message, output.message))
        self._turns.append(reply.turn)
        return reply

    def _encode(self, message: Message) -> ChatMessage:
        """Convert a message; a reply is sent back as inspect returned it, with the signature of its reasoning."""
        for reply, original in self._replies:
            if reply == message:
                return original
        calls = [
            {"id": call["id"], "function": call["name"], "arguments": call["arguments"]}
            for call in message.get("tool_calls", ())
        ]
        return TypeAdapter(ChatMessage).validate_python({**message, "tool_calls": calls} if calls else message)


def _as_openai(output: ModelOutput) -> bytes:
    """Return an output as a response of OpenAI; the arguments of a malformed tool call are the reason."""
    source, usage = output.message, output.usage
    parts: list[Any] = source.content if isinstance(source.content, list) else []
    calls = [
        {
            "id": call.id,
            "function": {"name": call.function, "arguments": call.parse_error or json.dumps(call.arguments)},
        }
        for call in source.tool_calls or ()
    ]
    thinking = "".join(part.reasoning for part in parts if part.type == "reasoning")
    message = {"content": source.text, "reasoning": thinking, "tool_calls": calls}
    stop = "length" if output.stop_reason == "max_tokens" else "stop"
    counts = {"prompt_tokens": usage.input_tokens, "completion_tokens": usage.output_tokens} if usage else {}
    return json.dumps({"choices": [{"message": message, "finish_reason": stop}], "usage": counts}).encode()
