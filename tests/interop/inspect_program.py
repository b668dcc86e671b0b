"""Play the tasks in inspect, with its mock of a model; run in inspect's own virtual environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from inspect_ai import eval
from inspect_ai.model import ChatMessage, GenerateConfig, ModelOutput, ModelUsage, get_model

sys.path.insert(0, str(Path(__file__).parent))
from played_tasks import answer, tasks

from rlkit.interop.inspect_task import inspect_task


def respond(messages: list[ChatMessage], tools: object, choice: object, config: GenerateConfig) -> ModelOutput:
    last = messages[-1]
    if last.role == "tool":
        assert messages[-2].role == "assistant" and messages[-2].tool_calls[0].id == last.tool_call_id
        output = ModelOutput.from_content("mock", f"seen: {last.text}")
    elif last.text == "look with the tool":
        assert [tool.name for tool in tools] == ["look"]
        output = ModelOutput.for_tool_call("mock", "look", {"at": "there"})
    else:
        output = ModelOutput.from_content("mock", answer(last.text))
    output.usage = ModelUsage(input_tokens=7, output_tokens=2, total_tokens=9)
    return output


(log,) = eval(
    inspect_task(tasks(), metrics=["replies"]),
    model=get_model("mockllm/model", custom_outputs=respond),
    fail_on_error=False,
    score_on_error=True,
    epochs=2,
    message_limit=6,
    time_limit=5,
    display="none",
)
samples = {
    f"{sample.id} {sample.epoch}": {
        "error": sample.error and sample.error.message,
        "score": sample.scores["rlkit"].value,
        "outcome": sample.scores["rlkit"].metadata,
        "messages": [message.text for message in sample.messages],
    }
    for sample in log.samples
}
means = {score.name: [score.metrics["mean"].value, score.scored_samples] for score in log.results.scores}
heavy = [name for name in ("torch", "tinker", "transformers") if name in sys.modules]
print(json.dumps({"status": log.status, "samples": samples, "means": means, "heavy": heavy}))
