"""Read exported episodes with inspect and scout; run in their virtual environment."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from inspect_ai.log import list_eval_logs, read_eval_log
from inspect_scout import TranscriptContent, transcripts_from

folder = Path(sys.argv[1])


def show_messages(messages: list) -> list:
    return [[message.role, message.text, message.metadata] for message in messages]


async def read_transcripts() -> dict:
    transcripts = dict[str, object]()
    async with transcripts_from(str(folder / "transcripts")).reader() as reader:
        async for info in reader.index():
            transcript = await reader.read(info, TranscriptContent(messages="all"))
            transcripts[info.transcript_id] = {
                **{name: getattr(info, name) for name in ("task_set", "task_id", "task_repeat", "model", "score")},
                **{name: getattr(info, name) for name in ("error", "total_time", "total_tokens", "message_count")},
                "metadata": dict(info.metadata),
                "messages": show_messages(transcript.messages),
            }
    return transcripts


logs = dict[str, object]()
for listed in list_eval_logs(str(folder / "logs")):
    log, header = read_eval_log(listed), read_eval_log(listed, header_only=True)
    assert (header.eval.eval_id, header.results, header.samples) == (log.eval.eval_id, log.results, None)
    logs[f"{log.eval.metadata['split']} {log.eval.metadata['step']} {log.eval.task}"] = {
        "status": log.status,
        "model": log.eval.model,
        "means": {score.name: score.metrics["mean"].value for score in log.results.scores},
        "samples": {
            sample.uuid: {
                "id": sample.id,
                "epoch": sample.epoch,
                "scores": {name: score.value for name, score in (sample.scores or {}).items()},
                "error": sample.error and sample.error.message,
                "completion": sample.output.completion,
                "stops": [choice.stop_reason for choice in sample.output.choices],
                "tokens": [[usage.input_tokens, usage.output_tokens] for usage in sample.model_usage.values()],
                "seconds": sample.total_time,
                "metadata": sample.metadata,
                "messages": show_messages(sample.messages),
            }
            for sample in log.samples
        },
    }
print(json.dumps({"logs": logs, "transcripts": asyncio.run(read_transcripts())}))
