"""Write a log of inspect_ai with its mock of a model; README.md tells how to run this program."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessage,
    ChatMessageAssistant,
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.scorer import match
from inspect_ai.solver import Generate, TaskState, generate, solver, use_tools
from inspect_ai.tool import tool

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk"
    "YPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
folder = Path(sys.argv[1])
replies = dict[str, int]()


def respond(messages: list[ChatMessage], tools: object, choice: object, config: GenerateConfig) -> ModelOutput:
    question = next(message.text for message in messages if message.role == "user")
    count = replies[question] = replies.get(question, 0) + 1
    if messages[-1].role == "tool":
        output = ModelOutput.from_content("mock", f"The sum is {messages[-1].text}")
    elif "tool" in question:
        output = ModelOutput.for_tool_call("mock", "add", {"x": 2, "y": 3})
    elif "picture" in question:
        content = [ContentReasoning(reasoning="A red pixel?"), ContentText(text="red" if count == 1 else "blue")]
        output = ModelOutput.from_message(ChatMessageAssistant(content=content, model="mock"))
    else:
        output = ModelOutput.from_content("mock", "<script>alert(1)</script> 4", stop_reason="max_tokens")
    output.usage = ModelUsage(input_tokens=7, output_tokens=3, total_tokens=10)
    return output


@tool
def add():
    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: first number
            y: second number
        """
        return x + y

    return execute


@solver
def fail_on_request():
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if "fail" in state.input_text:
            raise ValueError("the sandbox died\non two lines")
        return state

    return solve


@task
def sums() -> Task:
    picture = [ContentText(text="Which colour has the picture?"), ContentImage(image=PIXEL)]
    dataset = [
        Sample(id="tool", input="Add 2 and 3 with the tool", target="5", metadata={"level": "easy"}),
        Sample(id="picture", input=[ChatMessageUser(content=picture)], target="red"),
        Sample(id="plain", input="What is 2 + 2?", target="4"),
        Sample(id="fails", input="Please fail", target="4"),
    ]
    return Task(dataset=dataset, solver=[fail_on_request(), use_tools(add()), generate()], scorer=match())


(log,) = eval(
    sums(),
    model=get_model("mockllm/model", custom_outputs=respond),
    epochs=2,
    fail_on_error=False,
    max_samples=1,
    log_dir=str(folder / "work"),
    display="none",
)
written = Path(log.location.removeprefix("file://"))
shutil.copy(written, folder / "inspect.eval")
shutil.rmtree(folder / "work")
