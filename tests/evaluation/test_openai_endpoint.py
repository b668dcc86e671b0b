from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

import rlkit
from rlkit.config.schema import Config
from rlkit.errors import ContextFull, EnvironmentFault, LimitReached, ServiceError, UsageError
from rlkit.evaluation import openai_endpoint
from rlkit.evaluation.evaluate import evaluate
from rlkit.evaluation.openai_endpoint import Endpoint, EndpointPolicy, connect_endpoint
from rlkit.policy import Limits
from rlkit.types import Group, Message, Sampling
from tests.limits import HANG_S

ASKED: list[Message] = [{"role": "user", "content": "2 + 3 ="}]


def make_answer(text: str = "5", **choice: object) -> dict[str, object]:
    full_choice = {"message": {"role": "assistant", "content": text}, "text": text, "finish_reason": "stop", **choice}
    return {"id": "r-1", "choices": [full_choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


class Model(BaseHTTPRequestHandler):
    """Answers what it is told to, one answer a request, the last of them again and again."""

    slow: ClassVar[bool] = False
    request_id: ClassVar[str | None] = None
    answers: ClassVar[list[tuple[int, Mapping[str, object]]]] = []
    requests: ClassVar[list[tuple[str, str | None, dict[str, Any]]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append((self.path, self.headers.get("Authorization"), body))
        status, answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if self.request_id:
            self.send_header("x-request-id", self.request_id)
        self.end_headers()
        for piece in range(0, len(data), 10) if self.slow else ():
            self.wfile.write(data[piece : piece + 10])
            time.sleep(0.1)
        self.wfile.write(b"" if self.slow else data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Model.answers[:], Model.requests[:] = [(200, make_answer())], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def ask[T](
    url: str, use: Callable[[EndpointPolicy], Any], *, limits: Limits | None = None, timeout_s: float = HANG_S
) -> Any:
    async def main() -> Any:
        async with connect_endpoint(Endpoint(url, "big", "k-1"), timeout_s=timeout_s) as make:
            return await use(make(Sampling(max_tokens=9, temperature=0.0), limits or Limits()))

    return asyncio.run(main())


def test_conversation_is_requested_and_its_tokens_are_counted(url: str) -> None:
    async def use(policy: EndpointPolicy) -> None:
        reply = await policy.chat(ASKED, max_tokens=100)
        assert (reply.text, reply.truncated, reply.turn.request_id) == ("5", False, "r-1")
        assert (len(reply.turn.prompt), len(reply.turn.completion), len(reply.tokens)) == (7, 2, 9)
        await policy.chat([*ASKED, reply.message, {"role": "user", "content": "sure?"}])
        assert len(policy.turns) == 2

    ask(url, use)
    path, key, body = Model.requests[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k-1")
    assert body == {"model": "big", "max_tokens": 9, "temperature": 0.0, "top_p": 1.0, "messages": ASKED}
    assert [message["role"] for message in Model.requests[1][2]["messages"]] == ["user", "assistant", "user"]


def test_thinking_calls_and_truncated_replies_are_parsed(url: str) -> None:
    calls = [
        {"id": "c1", "function": {"name": "add", "arguments": '{"a": 2}'}},
        {"id": "c2", "function": {"name": "add", "arguments": "{"}},
    ]
    message = {"content": None, "reasoning_content": "hm", "tool_calls": calls}
    Model.answers[:] = [(200, make_answer(message=message, finish_reason="length"))]
    tool: rlkit.Tool = {"name": "add", "description": "", "parameters": {"type": "object"}}
    reply = ask(url, lambda policy: policy.chat(ASKED, tools=[tool]))
    assert (reply.thinking, reply.truncated, reply.malformed_tool_calls) == ("hm", True, ("add({)",))
    assert reply.tool_calls == [{"id": "c1", "name": "add", "arguments": {"a": 2}}]
    assert Model.requests[0][2]["tools"] == [{"type": "function", "function": tool}]


def test_a_text_is_completed(url: str) -> None:
    reply = ask(url, lambda policy: policy.sample("2 + 3 =", forced=" ", stop="\n"))
    assert reply.text == " 5"
    assert Model.requests[0][2]["prompt"] == "2 + 3 = "
    assert Model.requests[0][2]["stop"] == ["\n"]


def test_repeated_failures_are_a_service_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_endpoint, "_FIRST_WAIT_S", 0.01)
    Model.answers[:] = [(503, {}), (429, {}), (200, make_answer())]
    assert ask(url, lambda policy: policy.chat(ASKED)).text == "5"
    Model.answers[:] = [(500, {"error": "broken"})]
    monkeypatch.setattr(openai_endpoint, "_FIRST_WAIT_S", math.inf)  # no retry begins, and none takes too long
    with pytest.raises(ServiceError, match=r"does not answer: 500: .*broken"):
        ask(url, lambda policy: policy.chat(ASKED))
    with pytest.raises(ServiceError, match="does not answer: ConnectError"):
        ask("http://127.0.0.1:9/v1", lambda policy: policy.chat(ASKED))


@pytest.mark.parametrize(
    ("status", "error", "raised"),
    [
        (400, "the maximum context length is 10", ContextFull),
        (400, "unknown parameter", EnvironmentFault),
        (401, "who are you?", ServiceError),
    ],
)
def test_rejected_request_raises_the_matching_error(url: str, status: int, error: str, raised: type[Exception]) -> None:
    Model.answers[:] = [(status, {"error": error})]
    with pytest.raises(raised, match=error.rstrip("?")):
        ask(url, lambda policy: policy.chat(ASKED))


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"message": "no capacity"}},
        {"choices": []},
        {"choices": [{"message": "5"}]},
        {"choices": [{"message": {"content": 5}}]},
        {"choices": [{"message": {"tool_calls": [{}]}}]},
        {"choices": [{"message": {"content": "5"}}], "usage": {"prompt_tokens": "many"}},
        [],
        None,
    ],
)
def test_repeated_malformed_answers_are_a_service_error(
    url: str, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    monkeypatch.setattr(openai_endpoint, "_FIRST_WAIT_S", 0.01)
    Model.answers[:] = [(200, answer), (200, make_answer())]  # type: ignore[list-item]  what no endpoint should say
    assert ask(url, lambda policy: policy.chat(ASKED)).text == "5"
    Model.answers[:] = [(200, answer)]  # type: ignore[list-item]
    monkeypatch.setattr(openai_endpoint, "_FIRST_WAIT_S", math.inf)
    with pytest.raises(ServiceError, match=r"does not answer: malformed response \(.*Error\): "):
        ask(url, lambda policy: policy.chat(ASKED))


def test_trickling_answer_times_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "slow", True)
    with pytest.raises(ServiceError, match=r"does not answer: no complete response within 0\.3 s$"):
        ask(url, lambda policy: policy.chat(ASKED), timeout_s=0.3)


def test_impossible_token_counts_are_ignored(url: str) -> None:
    Model.answers[:] = [(200, {**make_answer(), "usage": {"prompt_tokens": -3, "completion_tokens": 10**15}})]
    reply = ask(url, lambda policy: policy.chat(ASKED))
    assert (len(reply.turn.prompt), len(reply.turn.completion)) == (1, openai_endpoint._MAX_TOKENS)


def test_parts_of_a_reply_are_joined(url: str) -> None:
    parts = [{"type": "text", "text": "5"}, {"type": "refusal"}, {"type": "text", "text": "!"}]
    Model.answers[:] = [(200, make_answer(message={"content": parts}))]
    assert ask(url, lambda policy: policy.chat(ASKED)).text == "5!"


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "https://", "http://host:port/v1", ""])
def test_malformed_address_is_an_error(url: str) -> None:
    with pytest.raises(UsageError, match=r"is not an address of the form https://HOST/v1$"):
        Endpoint(url, "big")


@pytest.mark.parametrize("key", ["sk-1\n2", "sk-é"])
def test_key_that_no_header_can_hold_is_an_error_without_the_key(key: str) -> None:
    with pytest.raises(UsageError, match=r"^OPENAI_API_KEY: the key has a line break") as refused:
        Endpoint("https://host/v1", "big", key)
    assert "sk-" not in str(refused.value)


def test_endpoint_without_a_key_gets_no_key_of_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other")
    monkeypatch.setenv("OPENAI_ADMIN_KEY", "sk-admin")

    async def main() -> None:
        async with connect_endpoint(Endpoint(url, "big"), timeout_s=HANG_S) as make:
            await make(Sampling(max_tokens=9), Limits()).chat(ASKED)

    asyncio.run(main())
    assert [key for _, key, _ in Model.requests] == [None]


def test_error_names_the_request(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "request_id", "req_7")
    Model.answers[:] = [(401, {"error": "who are you?"})]
    with pytest.raises(ServiceError, match=r"\(request req_7\)$"):
        ask(url, lambda policy: policy.chat(ASKED))


def test_the_turns_of_a_rollout_are_limited(url: str) -> None:
    async def use(policy: EndpointPolicy) -> None:
        await policy.chat(ASKED)
        with pytest.raises(LimitReached):
            await policy.chat(ASKED)

    ask(url, use, limits=Limits(max_turns=1))


def test_the_tokens_of_an_endpoint_are_unknown(url: str) -> None:
    with pytest.raises(EnvironmentFault, match="only the server of this policy's model knows its tokens"):
        ask(url, lambda policy: policy.count_tokens(ASKED))


def test_an_endpoint_is_evaluated_without_a_tinker_service(url: str) -> None:
    played = list[Group]()

    def scored(groups: Sequence[Group]) -> None:
        played.extend(groups)

    config = Config(envs={"arithmetic": {}}, eval={"envs": {"arithmetic": {"tasks": 30}}})  # type: ignore[arg-type]  as YAML gives them
    metrics = asyncio.run(evaluate(config, endpoint=Endpoint(url, "big"), on_groups=scored))
    right = sum(sum(map(int, group.task.split("+"))) == 5 for group in played)
    assert right > 0
    assert metrics["eval/arithmetic/reward/mean"] == pytest.approx(right / 30)
    assert metrics["eval/arithmetic/tokens/mean"] == 2
    assert all(key is None for _, key, _ in Model.requests)
