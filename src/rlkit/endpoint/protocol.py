"""The contract of an endpoint's protocols, each of which is a vendor's API for chats.

Invariant: a message of the client that equals a reply of the policy on the wire equals it as a message, so that the
conversation extends its exact tokens. A parameter that would change the reply in a way that the policy cannot is an
error.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, override

from pydantic import BaseModel, ConfigDict, FailFast, Field, PrivateAttr
from pydantic_core import from_json

from rlkit.endpoint.rejection import Rejection, explain_parser
from rlkit.types import ImagePart, Json, Message, Reply, TextPart, Tool

MODEL = "policy"
"""Name of a rollout's model; requests may name any."""

type Items[T] = Annotated[list[T], FailFast()]
"""A list of a request, of which the first wrong item is an error: millions of errors would take gigabytes."""

type Stops = Annotated[Items[Annotated[str, Field(min_length=1)]], Field(max_length=64)]
"""Stop strings; the limit is above those of vendors, because each of them is searched for in the reply."""

_UNIQUE_ID = re.compile(r"__[0-9a-f]{12}\Z")


@dataclass(frozen=True, slots=True)
class Call:
    """A request for replies, in rlkit's shapes; the arguments are those of `Policy.chat`."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    stop: Sequence[str] = ()
    choices: int = 1  # number of independent replies
    instructions: Sequence[Message] = ()  # messages before the conversation that a later request does not continue
    response_id: str | None = None  # id by which a later request can continue the conversation; None if it cannot


def make_tag() -> str:
    """Return a tag for the ids of a response."""
    return uuid.uuid4().hex[:12]


class Exchange(BaseModel, ABC):
    """A request of a client, with the shapes of its response; each subclass is a vendor's API at a path."""

    model_config = ConfigDict(extra="allow")

    path: ClassVar[str]
    keep_alive: ClassVar[str] = ": waiting for the reply\n\n"
    """Sign of life in a stream that waits for its reply."""

    model: str = MODEL  # name of the model that the client asks for
    stream: bool | None = None  # the client wants server-sent events

    _tag: str = PrivateAttr(default_factory=make_tag)
    """Tag for the ids of the response."""
    _created_at: int = PrivateAttr(default_factory=lambda: int(time.time()))

    @abstractmethod
    def make_call(self, conversations: Mapping[str, Sequence[Message]]) -> Call:
        """Return the request in rlkit's shapes; `conversations` can be continued by their ids.

        Raises:
            Rejection: the request is malformed, or the policy cannot follow it.
        """

    @abstractmethod
    def encode(self, replies: Sequence[Reply]) -> Mapping[str, Any]:
        """Return the body of the response."""

    @abstractmethod
    def encode_opening(self) -> Iterator[str]:
        """Yield the events of a stream that come before the reply."""

    @abstractmethod
    def encode_events(self, replies: Sequence[Reply]) -> Iterator[str]:
        """Yield the events of a stream from the reply to its end."""

    def encode_error_events(self, rejection: Rejection) -> Iterator[str]:
        """Yield the events that end a stream with an error."""
        yield format_event(rejection.encode(), name="error")


class ContentPart(BaseModel, ABC):
    """A part of the content of a client's message."""

    @abstractmethod
    def parse(self) -> TextPart | ImagePart:
        """Return the part in rlkit's shape."""


class Text(ContentPart):
    """A text, by its names in all protocols."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str

    @override
    def parse(self) -> TextPart:
        return {"type": "text", "text": self.text}


def format_event(data: Mapping[str, Any], *, name: str | None = None) -> str:
    """Return a server-sent event with JSON data."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n"


def make_unique_id(local_id: str, tag: str | None = None) -> str:
    """Return a tool call's id that no other turn has; formats count from 0 in each turn, and clients match by id.

    Args:
        tag: the response's tag, where its ids share one; a tag of its own by default.
    """
    return f"{local_id}__{tag or make_tag()}"


def read_unique_id(unique_id: str) -> str:
    """Return the id that the policy gave a tool call."""
    return _UNIQUE_ID.sub("", unique_id)


def read_tag(unique_id: str | None) -> str | None:
    """Return the tag of a unique id; None if the id is the client's own."""
    match = _UNIQUE_ID.search(unique_id or "")
    return None if match is None else match[0].removeprefix("__")


def parse_content(content: str | Sequence[ContentPart] | None) -> str | list[TextPart | ImagePart]:
    """Return the content of a message: a string, as in the policy's replies, unless it has images."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.parse() for part in content]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "".join(texts) if len(texts) == len(parts) else parts


def parse_arguments(call_id: str, arguments: str, *, field: str) -> Mapping[str, Json]:
    """Parse the arguments of a tool call that a client sends back in a field of its request."""
    try:
        value: Json = from_json(arguments or "{}")
        reason = ""
    except ValueError as error:
        value, reason = None, f": {explain_parser(str(error))}"
    if not isinstance(value, Mapping):
        raise Rejection(400, f"the arguments of the tool call {call_id!r} are not a JSON object{reason}", field=field)
    return value


def check_image_url(url: str, *, field: str) -> str:
    """Return the data URL of an image in a field of a request.

    Other URLs are rejected, or the run would open its own files and addresses.
    """
    if not url.startswith("data:"):
        raise Rejection(400, "images must be data URLs (data:image/png;base64,…)", field=field)
    return url


def check_parameters(
    parameters: Mapping[str, Any], *, ignored: frozenset[str], neutral: Mapping[str, Sequence[object]]
) -> None:
    """Raise a Rejection for a parameter that the policy cannot follow; null changes nothing.

    Args:
        parameters: parameters of the request that the protocol does not read.
        ignored: parameters without an effect on the distribution of the reply.
        neutral: values of further parameters that change nothing.
    """
    for name, value in parameters.items():
        if value is not None and name not in ignored and value not in neutral.get(name, ()):
            reason = f"{name}={json.dumps(value)[:100]} is not supported: leave it out"
            raise Rejection(400, reason, code="unsupported_parameter", field=name)


def count_tokens(replies: Sequence[Reply]) -> tuple[int, int]:
    """Return the tokens of the prompt, and of all completions together."""
    completion = sum(len(reply.turn.completion) for reply in replies)
    return len(replies[0].tokens) - len(replies[0].turn.completion), completion
