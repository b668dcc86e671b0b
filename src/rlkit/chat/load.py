"""The chat format of a configured model, with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from rlkit.chat.format import ChatFormat
from rlkit.chat.renderers import CHAT_TEMPLATE, chat_format
from rlkit.chat.tokenizers import has_weights, load_tokenizer
from rlkit.config.schema import Config
from rlkit.errors import MissingError


def load_chat(config: Config, *, engine: bool, note: Callable[[str], None], fetch: bool = True) -> ChatFormat:
    """Return the chat format of the configured model; prepare the model first if the embedded engine runs it.

    Args:
        engine: the embedded engine runs the model.
        note: receives progress of downloads and conversions.
        fetch: download weights that the embedded engine needs and that are not on this machine.

    Raises:
        UsageError: `chat.tokenizer` is a path without a tokenizer.
        MissingError: the model or its tokenizer cannot be loaded.
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
        raise MissingError(
            f"{error}. Without TINKER_API_KEY the embedded engine runs the model, and needs its weights"
        ) from error
    return chat_format(config.model, tokenizer, renderer=config.chat.renderer)
