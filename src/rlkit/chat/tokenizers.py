"""Where a model's tokenizer comes from.

Invariant: what needs no network goes before what does, and where nothing serves the answer comes within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlkit.chat.bundled_tokenizers import packaged
from rlkit.chat.hub import hub_problem
from rlkit.config.schema import DEFAULT_MODEL
from rlkit.errors import MissingError, UsageError

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer

_WAYS = (
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
    """The tokenizer of a model.

    Looked for in this order: `tokenizer`, where it is given; the model's own folder; what was registered with
    tinker-cookbook; the packages of `rlkit.chat.bundled_tokenizers`; the cache of the hub, and the hub.

    Args:
        model: a directory, or a name on the hub.
        with_weights: fetch the weights too, as the embedded engine will need them.
        note: told what is being fetched or converted.
        tokenizer: a folder, or another name on the hub, to take it from.
        template: whether it must bring a chat template, which the packages have none of.

    Raises:
        UsageError: `tokenizer` is a path without a tokenizer.
        MissingError: the model or its tokenizer cannot be had.
    """
    weights = _fetched(model, note) if with_weights else None
    if tokenizer is None and weights is not None:
        return _in_folder(weights)
    name = tokenizer or model
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _in_folder(folder) if tokenizer else _in_folder(_fetched(name, note))
    if tokenizer is not None and (name.startswith((".", "~", "/")) or name.count("/") > 1):
        raise UsageError(f"chat.tokenizer: there is no folder {name!r}")
    if name == DEFAULT_MODEL:
        return _in_folder(_fetched(name, note))
    from tinker_cookbook.tokenizer_utils import is_tokenizer_registered

    if not template and not is_tokenizer_registered(name) and (found := packaged(name)) is not None:
        return cast("Tokenizer", found)
    return _by_cookbook(name, known=is_tokenizer_registered(name) or name.startswith("thinkingmachines/"))


def has_weights(model: str, note: Callable[[str], None]) -> bool:
    """Whether the weights of a model are on this machine; a GGUF file is converted, and `note` told of it."""
    from rlkit.engine.model import models

    return models.find_model(model, progress=_Milestones(note)) is not None


def _fetched(model: str, note: Callable[[str], None]) -> Path:
    from rlkit.engine.model import models

    return models.resolve_model(model, progress=_Milestones(note))


def _in_folder(folder: Path) -> Tokenizer:
    from rlkit.engine.model import models

    return cast("Tokenizer", models.load_tokenizer(folder))


def _by_cookbook(name: str, *, known: bool) -> Tokenizer:
    """From the hub or its cache; `known` ones are made without it."""
    problem = None if known else hub_problem()
    if problem is not None:
        return _cached(name, problem)
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    try:
        return get_tokenizer(name)
    except OSError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingError(f"the tokenizer of {name} cannot be had from the hub: {first}. {_WAYS}") from error


def _cached(name: str, problem: str) -> Tokenizer:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        kept = isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str)
    except HFValidationError as error:
        raise UsageError(f"{name!r} is neither a folder nor a model's name on the hub") from error
    if not kept:
        raise MissingError(f"the tokenizer of {name} is not on this machine, and {problem}. {_WAYS}")
    from transformers import AutoTokenizer

    try:
        return cast("Tokenizer", AutoTokenizer.from_pretrained(name, local_files_only=True))
    except (OSError, ValueError) as error:
        raise MissingError(
            f"the tokenizer of {name} in the cache of the hub is not whole, and {problem}. {_WAYS}"
        ) from error


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
