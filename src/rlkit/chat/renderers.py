"""Chat formats: tinker-cookbook's renderers, and the chat template of a tokenizer.

Invariant: other modules use both only through `ChatFormat`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast, override

import numpy as np

from rlkit.chat.format import MAX_NESTING, TAIL_TOKENS, ChatFormat, ParsedReply, load_call, parse_text
from rlkit.chat.thinking_budget import end_of_thinking
from rlkit.config.schema import Config
from rlkit.errors import MissingError, UsageError
from rlkit.tokenizers.cached import cache_encodings
from rlkit.tokenizers.load import has_weights, load_tokenizer
from rlkit.tokenizers.token_text import token_text
from rlkit.types import IMAGE_TOKEN, Image, Message, Prompt, TokenPiece, Tokens, Tool, ToolCall, as_prompt, join

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Message as CookbookMessage
    from tinker_cookbook.renderers import Renderer
    from tinker_cookbook.tokenizer_utils import Tokenizer

CHAT_TEMPLATE = "chat_template"  # value of `chat.renderer` for the tokenizer's own template


def load_chat(config: Config, *, engine: bool, note: Callable[[str], None], fetch: bool = True) -> ChatFormat:
    """Return the chat format of the configured model; errors as in `load_tokenizer`.

    Args:
        engine: the embedded engine runs the model, and needs its weights.
        note: receives progress of downloads and conversions.
        fetch: download weights that are not on this machine.
    """
    try:
        tokenizer = load_tokenizer(
            config.model,
            with_weights=engine and (fetch or has_weights(config.model, note)),
            note=note,
            tokenizer=config.chat.tokenizer,
            template=config.chat.renderer == CHAT_TEMPLATE,
        )
    except MissingError as error:
        if not (engine and fetch):
            raise
        reason = "Without TINKER_API_KEY the embedded engine runs the model, and needs its weights"
        raise MissingError(f"{error}. {reason}") from error
    return chat_format(config.model, tokenizer, renderer=config.chat.renderer)


def chat_format(model: str, tokenizer: Tokenizer, *, renderer: str | None = None) -> ChatFormat:
    """Return the format of a model's conversations; raise UsageError if the renderer does not exist.

    Args:
        renderer: name of a renderer, `chat_template`, or None for tinker-cookbook's recommendation.
    """
    name, tokenizer = renderer or _recommended_renderer(model) or CHAT_TEMPLATE, cache_encodings(tokenizer)
    if name == CHAT_TEMPLATE:
        return TemplateChat(tokenizer)
    from tinker_cookbook.exceptions import TinkerCookbookError
    from tinker_cookbook.image_processing_utils import get_image_processor
    from tinker_cookbook.renderers import get_renderer

    try:
        return CookbookChat(get_renderer(name, tokenizer, model_name=model))
    except TinkerCookbookError as error:
        if "image_processor" not in str(error):
            raise UsageError(f"chat.renderer: {error}") from error
    return CookbookChat(get_renderer(name, tokenizer, get_image_processor(model), model_name=model))


def _recommended_renderer(model: str) -> str | None:
    from tinker_cookbook.exceptions import TinkerCookbookError
    from tinker_cookbook.model_info import get_recommended_renderer_name

    try:
        return get_recommended_renderer_name(model)
    except (TinkerCookbookError, KeyError, ValueError):  # unknown model
        return None


class _TokenizerChat(ChatFormat):
    """A chat format based on a `transformers` tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @override
    def encode(self, text: str) -> Tokens:
        # Without `verbose`, transformers does not warn about lengths, which rlkit checks itself.
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), np.int32)

    @override
    def decode(self, tokens: Tokens) -> str:
        return cast("str", self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    @override
    def piece(self, token: int) -> TokenPiece:
        is_special = not cast("str", self._tokenizer.decode([token], skip_special_tokens=True))
        return TokenPiece(token_text(self._tokenizer, token) or f"<{token}>".encode(), is_special)

    @override
    def close_thinking(self, prompt: Prompt, completion: Tokens, phrase: str) -> Tokens:
        tail = prompt.tokens[-TAIL_TOKENS:]
        # special tokens show whether the model is thinking
        text = cast("str", self._tokenizer.decode([*tail[tail != IMAGE_TOKEN].tolist(), *completion.tolist()]))
        return self.encode(end_of_thinking(text, phrase))


class TemplateChat(_TokenizerChat):
    """The Jinja chat template of a tokenizer."""

    keeps_thinking = False  # most templates drop it; templates that keep it extend prompts anyway

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        end = cast("int | None", tokenizer.eos_token_id)
        self.stop = () if end is None else (end,)

    @override
    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, whole: bool = False) -> Prompt:
        return as_prompt(self.encode(self._write(messages, tools, whole=whole)))

    @override
    def render_reply(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt | None:
        prompt, whole = self._write(messages[:-1], tools, whole=False), self._write(messages, tools, whole=True)
        # The texts, because a token may hold the end of the prompt and the beginning of the reply, as for line breaks.
        return as_prompt(self.encode(whole[len(prompt) :])) if whole.startswith(prompt) else None

    def _write(self, messages: Sequence[Message], tools: Sequence[Tool], *, whole: bool) -> str:
        template = cast("object", self._tokenizer.chat_template)
        if not template:
            name = getattr(self._tokenizer, "name_or_path", "") or "the model"
            raise UsageError(
                f"the tokenizer of {name} has no chat template, and tinker-cookbook has no chat format for a model of "
                "this name: check the name, set chat.renderer, or use policy.sample"
            )
        from jinja2 import TemplateError

        if not _TOOL_WORDS.search(str(template)):
            messages, tools = _tools_as_text(messages, tools), ()
        try:
            text = self._tokenizer.apply_chat_template(
                cast("list[dict[str, str]]", [_template_message(message) for message in messages]),
                tools=[{"type": "function", "function": dict(tool)} for tool in tools] or None,
                add_generation_prompt=not whole,
                tokenize=False,
            )
        except TemplateError as error:
            raise UsageError(f"the model's chat template rejects the conversation: {error}") from error
        return cast("str", text)

    @override
    def parse(self, completion: Tokens) -> ParsedReply:
        return parse_text(self.decode(completion))


_TOOL_WORDS = re.compile(r"\btools?\b|\btool_calls\b")  # words in templates that can render tools


def _tools_as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Write tools and tool calls as text, in the notation that `parse_text` reads."""
    plain = [_calls_as_text(message) for message in messages]
    if not tools:
        return plain
    functions = "\n".join(json.dumps({"type": "function", "function": dict(tool)}) for tool in tools)
    text = (
        f"You may call one or more functions. These are the functions:\n<tools>\n{functions}\n</tools>\n"
        'For each call, write: <tool_call>{"name": the function\'s name, "arguments": its arguments}</tool_call>'
    )
    if messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _calls_as_text(message: Message) -> Message:
    calls = [
        f"<tool_call>{json.dumps({'name': call['name'], 'arguments': call['arguments']})}</tool_call>"
        for call in message.get("tool_calls", [])
    ]
    content = message["content"]
    if not calls or not isinstance(content, str):
        return message
    return {"role": message["role"], "content": "\n".join([*([content] if content else []), *calls])}


def _template_message(message: Message) -> dict[str, object]:
    content = message["content"]
    if not isinstance(content, str):
        if any(part["type"] != "text" for part in content):
            raise UsageError("the model's chat template does not support images: set chat.renderer to one that does")
        content = "".join(part["text"] for part in content if part["type"] == "text")
    plain: dict[str, object] = {**message, "content": content}
    if "thinking" in message:
        plain["reasoning_content"] = plain.pop("thinking")
    if "tool_calls" in message:
        plain["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in message["tool_calls"]
        ]
    return plain


class CookbookChat(_TokenizerChat):
    """A renderer of tinker-cookbook."""

    def __init__(self, renderer: Renderer) -> None:
        super().__init__(renderer.tokenizer)
        self._renderer = renderer
        self.stop = tuple(renderer.get_stop_sequences())  # pyright: ignore[reportAttributeAccessIssue]  one kind in, one kind out
        self.keeps_thinking = renderer.has_extension_property

    @override
    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, whole: bool = False) -> Prompt:
        from tinker_cookbook.exceptions import RendererError
        from tinker_cookbook.renderers import TrainOnWhat

        conversation = [_cookbook_message(message) for message in messages]
        if tools:
            conversation = self._with_tools(conversation, tools)
        images = sum(part["type"] == "image" for message in messages for part in _as_parts(message["content"]))
        try:
            if whole:
                model_input, _ = self._renderer.build_supervised_example(conversation, TrainOnWhat.ALL_TOKENS)
            else:
                model_input = self._renderer.build_generation_prompt(conversation)
        except (NotImplementedError, AssertionError, RendererError) as error:
            if not images:
                raise
            raise self._no_images_error() from error
        pieces = list[Prompt]()
        for chunk in model_input.chunks:
            if chunk.type == "encoded_text":
                pieces.append(as_prompt(chunk.tokens))
            elif chunk.type == "image":
                if chunk.format not in ("png", "jpeg"):
                    raise UsageError(f"an image is encoded as {chunk.format!r}; the service supports png and jpeg")
                image = Image(0, chunk.length, chunk.data, chunk.format)
                pieces.append(Prompt(np.full(chunk.length, IMAGE_TOKEN, np.int32), (image,)))
            else:
                raise UsageError(f"a conversation has a part of type {chunk.type!r}; rlkit supports text and images")
        prompt = join(pieces)
        if len(prompt.images) < images:  # some renderers drop them silently
            raise self._no_images_error()
        return prompt

    def _no_images_error(self) -> UsageError:
        name = type(self._renderer).__name__
        return UsageError(f"chat.renderer: {name} does not support images: choose one that does")

    @override
    def parse(self, completion: Tokens) -> ParsedReply:
        message, _ = self._renderer.parse_response(completion.tolist())
        parts = _as_parts(message["content"])
        reply: Message = {"role": "assistant", "content": _join_parts(parts, "text")}
        if thinking := _join_parts(parts, "thinking"):
            reply["thinking"] = thinking
        malformed = [call.raw_text for call in message.get("unparsed_tool_calls", [])]
        calls = list[ToolCall]()
        for number, call in enumerate(message.get("tool_calls", [])):
            arguments = load_call(call.function.arguments, levels=MAX_NESTING)
            if isinstance(arguments, dict):
                calls.append({"id": call.id or f"call_{number}", "name": call.function.name, "arguments": arguments})
            else:
                malformed.append(call.function.arguments)
        if calls:
            reply["tool_calls"] = calls
        return ParsedReply(reply, tuple(malformed))

    def _with_tools(self, conversation: list[CookbookMessage], tools: Sequence[Tool]) -> list[CookbookMessage]:
        from tinker_cookbook.renderers import ToolSpec, ensure_text

        has_system = conversation[0]["role"] == "system"
        system = conversation[0]["content"] if has_system else ""
        specs = [
            ToolSpec(name=t["name"], description=t["description"], parameters=dict(t["parameters"])) for t in tools
        ]
        try:
            prefix = self._renderer.create_conversation_prefix_with_tools(specs, ensure_text(system))
        except NotImplementedError:
            name = type(self._renderer).__name__
            raise UsageError(f"chat.renderer: {name} cannot show tools to the model; choose another") from None
        return [*prefix, *conversation[1 if has_system else 0 :]]


def _cookbook_message(message: Message) -> CookbookMessage:
    from tinker_cookbook.renderers import ToolCall as CookbookToolCall

    keys = ("role", "content", "tool_call_id", "name")
    converted: dict[str, object] = {key: value for key, value in message.items() if key in keys}
    if thinking := message.get("thinking"):
        converted["content"] = [{"type": "thinking", "thinking": thinking}, *_as_parts(message["content"])]
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [
            CookbookToolCall(
                id=call["id"],
                function=CookbookToolCall.FunctionBody(name=call["name"], arguments=json.dumps(call["arguments"])),
            )
            for call in calls
        ]
    return cast("CookbookMessage", converted)


def _as_parts(content: str | Sequence[Mapping[str, object]]) -> Sequence[Mapping[str, object]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _join_parts(parts: Sequence[Mapping[str, object]], kind: str) -> str:
    return "".join(str(part.get(kind, "")) for part in parts if part["type"] == kind).strip()
