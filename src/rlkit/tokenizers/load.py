"""Load the tokenizer of a model from the first source that has it.

Invariant: sources without network come first; if the hub is unreachable, the error comes within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from rlkit._util.model_names import DEFAULT_MODEL
from rlkit._util.paths import expand_user
from rlkit.engine.model import model_files
from rlkit.errors import MissingError, UsageError
from rlkit.tokenizers.hub import hub_problem

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer

_FIXES = (
    "Four ways: for the model of a run, set chat.tokenizer to a folder with its tokenizer.json; choose a model whose "
    "tokenizer is part of tml-renderers (Qwen3, Qwen3.5, gpt-oss, DeepSeek-V3.1, GLM-5.3, Nemotron 3); for Llama 3, "
    "`pip install llama-models`; or connect to the hub once (HF_ENDPOINT sets a mirror, HF_TOKEN gives access)"
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

    The sources, in order: `tokenizer`; the model's folder; tinker-cookbook's registry; `bundled`; the hub's cache, and
    the hub.

    Args:
        model: directory, or name on the hub.
        with_weights: download the weights too, for the embedded engine.
        note: receives progress of downloads and conversions.
        tokenizer: folder, or name on the hub, of another tokenizer.
        template: require a chat template, which bundled tokenizers do not have.

    Raises:
        UsageError: `tokenizer` is a path without a tokenizer.
        MissingError: the model or its tokenizer cannot be loaded.
    """
    weights = model_files.resolve_model(model, progress=_ProgressNotes(note)) if with_weights else None
    name = tokenizer or model
    folder = expand_user(name)
    if tokenizer is not None and folder.is_dir():
        return cast("Tokenizer", model_files.load_tokenizer(folder))
    if tokenizer is not None and (name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise UsageError(f"chat.tokenizer: there is no folder {name!r}")
    if tokenizer is None and weights is not None:
        return cast("Tokenizer", model_files.load_tokenizer(weights))
    if folder.is_dir() or name == DEFAULT_MODEL:
        directory = model_files.resolve_model(name, progress=_ProgressNotes(note))
        return cast("Tokenizer", model_files.load_tokenizer(directory))
    from tinker_cookbook.tokenizer_utils import is_tokenizer_registered

    from rlkit.tokenizers.bundled import load_bundled_tokenizer

    registered = is_tokenizer_registered(name)
    if not template and not registered and (bundled := load_bundled_tokenizer(name)) is not None:
        return cast("Tokenizer", bundled)
    needs_hub = not registered and not name.startswith("thinkingmachines/")
    problem = hub_problem() if needs_hub else None
    return _load_by_cookbook(name) if problem is None else _load_cached(name, problem)


def has_weights(model: str, note: Callable[[str], None]) -> bool:
    """Return whether the weights of a model are on this machine; convert a GGUF file, with progress to `note`."""
    return model_files.find_model(model, progress=_ProgressNotes(note)) is not None


def _load_by_cookbook(name: str) -> Tokenizer:
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    try:
        return get_tokenizer(name)
    except (OSError, ValueError) as error:
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


@dataclass
class _ProgressNotes:
    """Sends a note for each message, and for each 10 % of its progress."""

    note: Callable[[str], None]
    newest: tuple[str, int] = ("", -1)

    def __call__(self, message: str, fraction: float | None) -> None:
        tenth = 0 if fraction is None else int(fraction * 10)
        if (message, tenth) != self.newest:
            self.newest = (message, tenth)
            self.note(message if fraction is None else f"{message} {tenth * 10} %")
