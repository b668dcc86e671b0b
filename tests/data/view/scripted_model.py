"""A scripted model behind HTTP, for the programs that write results folders of verifiers."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

calls = Counter[str]()


class Model(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        messages = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"]
        question = next(message["content"] for message in messages if message["role"] == "user")
        calls[question] += 1
        message: dict[str, Any] = {"role": "assistant", "content": None}
        finish = "stop"
        if question == "reject this":
            self.respond(400, {"error": {"message": "rejected by the provider"}})
            return
        if messages[-1]["role"] == "tool":
            message["content"] = f"The sum is {messages[-1]['content']}"
        elif "tool" in question:
            call = {"name": "add", "arguments": '{"x": 2, "y": 3}'}
            message["tool_calls"] = [{"id": "call-1", "type": "function", "function": call}]
            finish = "tool_calls"
        else:
            message["content"] = "<script>alert(1)</script> 4" if calls[question] == 1 else "5, I think,"
            message["reasoning_content"] = "two and two"
            finish = "stop" if calls[question] == 1 else "length"
        choice = {"index": 0, "finish_reason": finish, "message": message}
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


def start_model() -> str:
    """Return the address of a model that answers until the program ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"
