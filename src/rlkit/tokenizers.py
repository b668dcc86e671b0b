"""Where a model's tokenizer comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit.config.schema import DEFAULT_MODEL
from rlkit.errors import MissingError

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer


def load_tokenizer(model: str, *, with_weights: bool, note: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        model: a directory, or a name on the hub.
        with_weights: fetch the weights too, as the embedded engine will need them.
        note: told what is being fetched or converted.

    Raises:
        MissingError: the model or its tokenizer cannot be had.
    """
    if with_weights or model == DEFAULT_MODEL or Path(model).expanduser().is_dir():
        from rlkit.engine import models

        tokenizer = models.load_tokenizer(models.resolve_model(model, progress=_Milestones(note)))
        return cast("Tokenizer", tokenizer)
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    try:
        return get_tokenizer(model)
    except OSError as error:
        first = str(error).strip().splitlines()[0]
        raise MissingError(f"the tokenizer of {model} cannot be loaded from the hub: {first}") from error


class _Milestones:
    """Tells each message once, and then each tenth of its way."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._told: tuple[str, int] = ("", -1)

    def __call__(self, message: str, fraction: float | None) -> None:
        tenth = 0 if fraction is None else int(fraction * 10)
        if (message, tenth) != self._told:
            self._told = (message, tenth)
            self._note(message if fraction is None else f"{message} {tenth * 10} %")
