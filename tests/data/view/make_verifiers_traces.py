"""Write a results folder of verifiers 0.4; README.md tells how to run this program."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import verifiers.v1 as vf
from scripted_model import start_model
from verifiers.v1.cli.eval.runner import run_eval
from verifiers.v1.configs.cli.eval import EvalConfig

QUESTIONS = {"sum": "What is 2 + 2?", "tool": "Add 2 and 3 with the tool", "rejected": "reject this"}


class Sum(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float((trace.nodes[-1].message.content or "").endswith(("4", "5")))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes[-1].message.content or ""))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for name, question in QUESTIONS.items():
            yield Sum(vf.TaskData(id=name, name=name, prompt=question, system_prompt="Answer briefly."))


class Chat(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str, *rest: object
    ) -> vf.ProgramResult:
        data = trace.task.data
        messages = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}]
        headers = {"authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            while True:
                body = {"model": ctx.model, "messages": messages}
                response = (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status()
                message = response.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in message["tool_calls"]
                ]


__all__ = ["Chat", "Sums"]  # where verifiers looks for the taskset and the harness

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    os.environ["MODEL_KEY"] = "none"
    agent = {"harness": {"id": "make_verifiers_traces"}, "runtime": {"type": "subprocess"}}
    settings = {
        "env": {"taskset": {"id": "make_verifiers_traces"}, "agent": agent},
        "run": {"name": "sums"},
        "model": "m",
        "client": {"base_url": start_model(), "api_key_var": "MODEL_KEY"},
        "num_rollouts": 2,
        "max_concurrent": 1,
        "rich": None,
        "push": False,
        "output_dir": str(folder),
    }
    asyncio.run(run_eval(EvalConfig.model_validate(settings)))
    shutil.rmtree(folder / "sums" / "logs", ignore_errors=True)
    (folder / "sums").rename(folder / "verifiers_traces")
