"""The work of `endpoint.py`: the conversation, its client, and the processes that answer it.

Every reply is the same call of a tool, so the servers need no state. A server prints its address as a line of JSON. The
endpoint's server then reads commands: `open N` opens the endpoints of N rollouts and prints their keys, `close` closes
them, and `chat N` plays N conversations by `policy.chat`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from rlkit.rollout.recorder import RecordingPolicy
from rlkit.types import Completion, Message, Prompt, Sampling, Tool

if TYPE_CHECKING:
    import aiohttp

    from rlkit.chat.format import ChatFormat
    from rlkit.policy import Sampler

TURNS = 6
SYSTEM = "You answer questions about the documents of a company. Search before you answer, and name your sources. " * 10
QUESTION = "Which of our suppliers delivered late in the third quarter, and by how many days on average?"
RESULT = "Document 17, page 4: the delivery of 12 September arrived three days after the date of the contract. " * 8
TEXT = "The documents of the last search name one supplier. I will look for the others in the list of deliveries."
ARGUMENTS = {"query": "deliveries third quarter late supplier", "limit": 10}
REPLY = f'{TEXT}\n<tool_call>\n{{"name": "search", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
SEARCH: Tool = {
    "name": "search",
    "description": "Search the documents.",
    "parameters": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["query"],
    },
}
TOOLS = [{"type": "function", "function": SEARCH}]
MAX_TOKENS = 1024


def make_result() -> str:
    """Return the result of a search, which no other search has."""
    return f"Search {secrets.token_hex(8)}. {RESULT}"


async def hold_conversation(
    client: aiohttp.ClientSession, url: str, key: str, *, stream: bool, turns: int = TURNS
) -> None:
    """Hold a conversation as agents do, and check each reply."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    headers = {"authorization": f"Bearer {key}"}
    for _ in range(turns):
        body = {"model": "policy", "messages": messages, "tools": TOOLS, "stream": stream}
        async with client.post(f"{url}/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
            assert response.status == 200, text
        message = join_events(text) if stream else json.loads(text)["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert message["content"].strip() == TEXT
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        reply = {"role": "assistant", "content": message["content"], "tool_calls": [call]}
        messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": make_result()}]


def join_events(text: str) -> dict[str, Any]:
    """Return the message of a stream with a tool call."""
    assert text.rstrip().endswith("data: [DONE]"), text[-200:]
    content, call = "", {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line.removeprefix("data: "))
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls") or ():
                call["id"] = call["id"] or part.get("id") or ""
                for field, value in part["function"].items():
                    call["function"][field] += value or ""
    return {"content": content, "tool_calls": [call]}


async def chat(policy: RecordingPolicy) -> None:
    """Hold the same conversation by `policy.chat`."""
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for _ in range(TURNS):
        reply = await policy.chat(messages, tools=[SEARCH])
        assert reply.text.strip() == TEXT
        call_id = reply.tool_calls[0]["id"]
        messages += [reply.message, {"role": "tool", "tool_call_id": call_id, "content": make_result()}]


def answer(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class SlowSampler:
    """A sampler whose replies take some seconds; 0 for none."""

    version = 0

    def __init__(self, chat_format: ChatFormat, seconds: float) -> None:
        from rlkit.testing import ScriptedSampler

        self._sampler = ScriptedSampler(lambda prompt, *, seed: REPLY, chat=chat_format)
        self._seconds = seconds
        self.running = self.peak = 0

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        self.running += 1
        self.peak = max(self.peak, self.running)
        if self._seconds:
            await asyncio.sleep(self._seconds)
        self.running -= 1
        self._sampler.requests.clear()  # it would hold the prompts of all rounds
        return await self._sampler.sample(prompt, sampling, seed=seed, num_samples=num_samples)


@asynccontextmanager
async def open_sampler(kind: str, argument: str) -> AsyncGenerator[tuple[Sampler, ChatFormat]]:
    """Yield a sampler and its chat format.

    Args:
        kind: `scripted`; `service` for a Tinker service at TINKER_BASE_URL; or `engine` for the embedded engine.
        argument: seconds of a scripted reply, or the model.
    """
    if kind == "scripted":
        from rlkit.testing import ByteChat

        chat_format = ByteChat()
        yield SlowSampler(chat_format, float(argument)), chat_format
        return
    from rlkit.chat.renderers import chat_format as make_chat_format
    from rlkit.config.schema import ServiceConfig
    from rlkit.tinker_client.connect import connect
    from rlkit.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer(argument, with_weights=kind == "engine", note=lambda message: None)
    renderer = "qwen3" if kind == "service" else "chat_template"
    async with connect(ServiceConfig()) as service:
        yield await service.sampler(model=argument), make_chat_format(argument, tokenizer, renderer=renderer)


async def serve_endpoint(kind: str, argument: str) -> None:
    """Serve endpoints, see the module."""
    async with open_sampler(kind, argument) as (sampler, chat_format), AsyncExitStack() as endpoints:

        def make_policy() -> RecordingPolicy:
            return RecordingPolicy(
                sampler=lambda: sampler,
                chat=chat_format,
                sampling=Sampling(max_tokens=MAX_TOKENS),
                seed=lambda turn: turn,
            )

        answer()
        while line := await asyncio.to_thread(sys.stdin.readline):
            command, _, count = line.strip().partition(" ")
            if command == "open":
                opened = [await endpoints.enter_async_context(make_policy().endpoint()) for _ in range(int(count))]
                answer(url=opened[0].url, keys=[endpoint.key for endpoint in opened])
            elif command == "close":
                await endpoints.aclose()
                answer(peak=getattr(sampler, "peak", None))
            elif command == "chat":
                await asyncio.gather(*(chat(make_policy()) for _ in range(int(count))))
                answer()
            elif command == "steps":
                answer(step_s=await time_step(sampler, chat_format, int(count)))


async def time_step(sampler: Sampler, chat_format: ChatFormat, tokens: int) -> float:
    """Return the time of a decoding step: that of `tokens` steps after the first, without the prompt."""
    prompt = chat_format.render([{"role": "user", "content": QUESTION}])
    clock = asyncio.get_running_loop().time

    async def sample(count: int) -> tuple[float, int]:
        began_s = clock()
        (completion,) = await sampler.sample(prompt, Sampling(max_tokens=count, stop=()), seed=0)
        return clock() - began_s, len(completion.tokens)

    first_s, _ = await sample(1)
    total_s, count = await sample(tokens)
    return (total_s - first_s) / (count - 1)


def serve_stand_in(bodies: dict[str, tuple[bytes, str]], *, stream: bytes = b"") -> None:
    """Answer each request at once with the body and media type of the end of its path.

    Args:
        bodies: for each end of a path the response.
        stream: body of the response to a request for a stream.
    """
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def respond(request: Request) -> Response:
        body = await request.body()
        if stream and b'"stream":true' in body.replace(b" ", b""):
            return Response(stream, media_type="text/event-stream")
        content, media_type = bodies[request.url.path.rpartition("/")[2]]
        return Response(content, media_type=media_type)

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer(root=f"http://127.0.0.1:{listener.getsockname()[1]}")
    config = uvicorn.Config(
        Starlette(routes=[Route("/{path:path}", respond, methods=["GET", "POST"])]), log_config=None
    )
    asyncio.run(uvicorn.Server(config).serve([listener]))


def serve_openai() -> None:
    """Stand in for the provider behind a proxy: answer chat completions."""
    call = {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": json.dumps(ARGUMENTS)}}
    message = {"role": "assistant", "content": TEXT, "tool_calls": [call]}
    head = {"id": "chatcmpl-0", "created": 1, "model": "policy"}
    usage = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    body = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
    delta = {**message, "tool_calls": [{"index": 0, **call}]}
    chunks = [
        {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": part, "finish_reason": reason}]}
        for part, reason in (({"role": "assistant", "content": ""}, None), (delta, None), ({}, "tool_calls"))
    ]
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    serve_stand_in({"completions": (json.dumps(body).encode(), "application/json")}, stream=events.encode())


def serve_tinker(model: str) -> None:
    """Stand in for the Tinker service: answer the SDK's requests for samples of a model."""
    import numpy as np
    from tinker.proto import tinker_public_pb2 as pb

    from rlkit.tokenizers.load import load_tokenizer

    tokenizer = load_tokenizer(model, with_weights=False, note=lambda message: None)
    tokens = np.array(tokenizer.encode(f"{REPLY}<|im_end|>", add_special_tokens=False), np.int32)
    response = pb.SampleResponse()
    response.sequences.add(
        stop_reason=pb.STOP_REASON_STOP, tokens=tokens.tobytes(), logprobs=np.full(len(tokens), -1, "f4").tobytes()
    )
    bodies: dict[str, object] = {
        "config": {"pjwt_auth_enabled": False},
        "dynamic_config": {},
        "create_session": {"session_id": "session", "type": "create_session"},
        "session_heartbeat": {"type": "session_heartbeat"},
        "telemetry": {"status": "accepted"},
        "finish": {},
        "healthz": {"status": "ok"},
        "get_server_capabilities": {"supported_models": [{"model_name": model}]},
        "create_sampling_session": {"sampling_session_id": "sampler", "type": "create_sampling_session"},
        "sampler": {"sampler_id": "sampler", "base_model": model, "model_path": None},
        "asample": {"request_id": "sample", "sample_sequence_ids": ["sample.0"]},
    }
    encoded = {name: (json.dumps(body).encode(), "application/json") for name, body in bodies.items()}
    serve_stand_in(encoded | {"retrieve_future": (response.SerializeToString(), "application/x-protobuf")})


def main() -> None:
    match sys.argv[1:]:
        case ["openai"]:
            serve_openai()
        case ["tinker", model]:
            serve_tinker(model)
        case ["endpoint", kind, argument]:
            asyncio.run(serve_endpoint(kind, argument))


if __name__ == "__main__":
    main()
