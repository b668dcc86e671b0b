"""Load the chat format of the configured model."""

from __future__ import annotations

from collections.abc import Callable

from rlkit.chat.format import ChatFormat
from rlkit.chat.renderers import CHAT_TEMPLATE, chat_format
from rlkit.config.schema import Config
from rlkit.errors import MissingError
from rlkit.tokenizers.load import has_weights, load_tokenizer


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
        raise MissingError(
            f"{error}. Without TINKER_API_KEY the embedded engine runs the model, and needs its weights"
        ) from error
    return chat_format(config.model, tokenizer, renderer=config.chat.renderer)
