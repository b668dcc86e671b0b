"""Play the tasks in verifiers, with a model behind HTTP; run in verifiers' own virtual environment."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

sys.path.insert(0, str(Path(__file__).parent))
from played_tasks import Rejected, answer, tasks

from rlkit.interop.verifiers_env import verifiers_environment

bodies = list[dict[str, Any]]()


class Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        bodies.append(body)
        message: dict[str, Any] = {"role": "assistant", "content": None}
        last = body["messages"][-1]
        if last["content"] == "reject this":
            self.respond(400, {"error": {"message": "rejected by the provider"}})
            return
        if last["role"] == "tool":
            message["content"] = f"seen: {last['content']}"
        elif last["content"] == "look with the tool":
            call = {"name": body["tools"][0]["function"]["name"], "arguments": '{"at": "there"}'}
            message["tool_calls"] = [{"id": "call-1", "type": "function", "function": call}]
        else:
            message["content"] = answer(last["content"])
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        reply = {"id": "reply-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        self.respond(200, {**reply, "usage": usage})

    def respond(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


async def play(url: str) -> dict[str, Any]:
    environment = verifiers_environment([*tasks(), Rejected()])
    environment.config.agent.max_turns = 3
    environment.config.agent.timeout.rollout = 5
    client = vf.EvalClientConfig(base_url=url, api_key_var="MODEL_KEY")
    model = vf.ModelContext(model="m", client=client, sampling=vf.Sampling(temperature=0.5))
    traces = dict[str, Any]()
    async with environment.serving():
        for task in environment.taskset:
            (slot,) = environment.slots(task)
            episode = await environment.run_slot(slot, model)
            vf.WireEpisode.model_validate_json(episode.model_dump_json())  # as it travels and is saved
            (trace,) = episode.traces
            traces[task.data.id] = {
                "ok": trace.ok,
                "stop": trace.stop_condition,
                "rewards": {name: reward and reward.score for name, reward in trace.rewards.items()},
                "metrics": trace.metrics,
                "info": trace.info,
                "errors": [[error.type, error.message] for error in trace.errors],
                "messages": [message.content for message in trace.branches[-1].messages] if trace.nodes else [],
            }
    return traces


def load_own_taskset() -> list[str]:
    """The tasks of a taskset that a file of the user names."""
    config = {"taskset": {"id": "own-sums"}, "agent": {"runtime": {"type": "subprocess"}}}
    environment = vf.load_environment(vf.resolve_env_config(config))
    return [task.data.id for task in environment.taskset]


server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
played = asyncio.run(play(f"http://127.0.0.1:{server.server_port}/v1"))
sys.path.insert(0, str(Path.cwd()))
own = load_own_taskset()
heavy = [name for name in ("torch", "tinker", "rlkit.engine") if name in sys.modules]
settings = [{name: value for name, value in body.items() if name not in ("messages", "tools")} for body in bodies]
print(json.dumps({"traces": played, "own": own, "heavy": heavy, "settings": settings}))
