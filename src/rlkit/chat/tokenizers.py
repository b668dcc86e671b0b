"""The tokenizer of a model, from the first place that has it.

Invariant: places that need no network come first; if none has the tokenizer, an error says so within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit.chat.bundled_tokenizers import load_bundled_tokenizer
from rlkit.chat.hub import hub_problem
from rlkit.config.schema import DEFAULT_MODEL
from rlkit.errors import MissingError, UsageError

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer

_FIXES = (
    "Four ways: set chat.tokenizer to a folder that holds its tokenizer.json; take a model whose tokenizer comes with "
    "tml-renderers (Qwen3, Qwen3.5, gpt-oss, DeepSeek-V3.1, GLM-5.3, Nemotron 3); for Llama 3, "
    "`pip install llama-models`; or reach the hub once (HF_ENDPOINT names a mirror, HF_TOKEN opens what is private)"
)


def load_tokenizer(
    model: str,
    *,
    with_weights: bool,
    note: Callable[[str], None],
    tokenizer: str | None = None,
    template: bool = False,
) -> Tokenizer:
    """Return the tokenizer of a model.

    The places, in order: `tokenizer`; the model's own folder; tinker-cookbook's registry; the packages of
    `rlkit.chat.bundled_tokenizers`; the cache of the hub, and the hub.

    Args:
        model: a directory, or a name on the hub.
        with_weights: fetch the weights too, which the embedded engine needs.
        note: receives progress of downloads and conversions.
        tokenizer: a folder, or another name on the hub, to take the tokenizer from.
        template: the tokenizer must have a chat template; those of the packages have none.

    Raises:
        UsageError: `tokenizer` is a path without a tokenizer.
        MissingError: the model or its tokenizer cannot be loaded.
    """
    weights = _fetch_weights(model, note) if with_weights else None
    name = tokenizer or model
    folder = Path(name).expanduser()
    if tokenizer is not None and folder.is_dir():
        return _load_from_folder(folder)
    if tokenizer is not None and (name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise UsageError(f"chat.tokenizer: there is no folder {name!r}")
    if tokenizer is None and weights is not None:
        return _load_from_folder(weights)
    if folder.is_dir() or name == DEFAULT_MODEL:
        return _load_from_folder(_fetch_weights(name, note))
    from tinker_cookbook.tokenizer_utils import is_tokenizer_registered

    registered = is_tokenizer_registered(name)
    if not template and not registered and (bundled := load_bundled_tokenizer(name)) is not None:
        return cast("Tokenizer", bundled)
    if registered or name.startswith("thinkingmachines/"):  # needs no hub
        return _load_by_cookbook(name)
    problem = hub_problem()
    return _load_by_cookbook(name) if problem is None else _load_cached(name, problem)


def has_weights(model: str, note: Callable[[str], None]) -> bool:
    """Return whether the weights of a model are on this machine; convert a GGUF file, with progress to `note`."""
    from rlkit.engine.model import model_files

    return model_files.find_model(model, progress=_ProgressNotes(note)) is not None


def _fetch_weights(model: str, note: Callable[[str], None]) -> Path:
    from rlkit.engine.model import model_files

    return model_files.resolve_model(model, progress=_ProgressNotes(note))


def _load_from_folder(folder: Path) -> Tokenizer:
    from rlkit.engine.model import model_files

    return cast("Tokenizer", model_files.load_tokenizer(folder))


def _load_by_cookbook(name: str) -> Tokenizer:
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    try:
        return get_tokenizer(name)
    except OSError as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingError(f"the tokenizer of {name} cannot be loaded from the hub: {reason}. {_FIXES}") from error


def _load_cached(name: str, problem: str) -> Tokenizer:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
    except HFValidationError as error:
        raise UsageError(f"{name!r} is neither a folder nor a model's name on the hub") from error
    if not cached:
        raise MissingError(f"the tokenizer of {name} is not on this machine, and {problem}. {_FIXES}")
    from transformers import AutoTokenizer

    try:
        return cast("Tokenizer", AutoTokenizer.from_pretrained(name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise MissingError(
            f"the tokenizer of {name} in the cache of the hub is incomplete, and {problem}. {_FIXES}"
        ) from error


class _ProgressNotes:
    """A note of each message, and of each tenth of its progress."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._newest: tuple[str, int] = ("", -1)

    def __call__(self, message: str, fraction: float | None) -> None:
        tenth = 0 if fraction is None else int(fraction * 10)
        if (message, tenth) != self._newest:
            self._newest = (message, tenth)
            self._note(message if fraction is None else f"{message} {tenth * 10} %")
