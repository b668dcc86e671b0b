"""Comparison of the tokenizers of two models.

Invariant: two models count as equal only if every id that both can tell has the same text, and a sample of text the
same ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlkit.config.loading.run_config import find_run, load_run_config
from rlkit.config.schema import Config
from rlkit.errors import MissingError, UsageError
from rlkit.tokenizers.load import load_tokenizer

if TYPE_CHECKING:
    from tinker_cookbook.tokenizer_utils import Tokenizer

_SAMPLE = (
    "Prove that 12 + 7,381.05 = 7393.05.\n\tdef f(x): return x**2  # naïve\n\n"
    '<think>Ωmega, 数学, и 🙂</think> {"role": "user"} \\frac{1}{2}   THE END'
)


def require_equal_tokenizers(config: Config, model: str, *, field: str, note: Callable[[str], None]) -> None:
    """Raise UsageError, with the field of another model, if its tokenizer is not that of the run's model."""
    if model == config.model:
        return
    own = load_tokenizer(config.model, with_weights=False, tokenizer=config.chat.tokenizer, note=note)
    try:
        other = load_tokenizer(model, with_weights=False, note=note)
    except (UsageError, MissingError) as error:
        raise type(error)(f"{field}: {error}") from error
    if (problem := find_difference(own, other)) is not None:
        fix = "choose a model of the same family"
        raise UsageError(f"{field}: the tokenizer of {model} is not that of {config.model}: {problem}; {fix}")


def check_source_runs(config: Config, *, note: Callable[[str], None]) -> None:
    """Raise UsageError if a run, whose episodes are trained on, has another tokenizer than the run's model."""
    for name in config.envs.keys() - config.reinforced_envs.keys():
        if isinstance(run := config.envs[name].args.get("run"), str):
            model = load_run_config(find_run(run)).model
            require_equal_tokenizers(config, model, field=f"{config.find_field(name)}.run", note=note)


def find_difference(own: Tokenizer, other: Tokenizer) -> str | None:
    """Return the first difference of two tokenizers in words; None if there is none."""
    if hasattr(own, "get_vocab") and hasattr(other, "get_vocab"):  # the tokenizers of packages list no texts
        first, second = own.get_vocab(), other.get_vocab()
        texts = {token: text for text, token in second.items()}
        for text, token in first.items():
            if second.get(text, token) != token:
                return f"the token {text!r} is {token} in one and {second[text]} in the other"
            if texts.get(token, text) != text:
                return f"token {token} is {text!r} in one and {texts[token]!r} in the other"
    ids = [tokenizer.encode(_SAMPLE) for tokenizer in (own, other)]
    if ids[0] != ids[1]:
        place = next((n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
        return f"they encode a sample text differently from token {place} on"
    return None
