"""Removal of secrets from episodes.

Invariant: the text that an environment adds to an episode, keys of its info included, contains no secret. Prompts and
completions are unchanged, because the run trains on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from rlkit._util.json_values import map_text
from rlkit.types import Episode, Json


def redact_episode(episode: Episode, make_redactor: Callable[[], Callable[[str], str]]) -> Episode:
    """Return the episode without secrets in its error and its info.

    `make_redactor` reads the secrets, which takes longer than most rollouts, so it is called only if there is text.
    """
    if episode.error is None and not episode.info:
        return episode
    redact = make_redactor()
    error = None if episode.error is None else redact(episode.error)
    texts = list[str]()

    def collect(text: str) -> str:
        texts.append(text)
        return text

    map_text(episode.info, collect, keys=True)
    text = "\n".join(texts)
    if redact(text) == text:  # the usual case; redacting one long text is faster than many short ones
        return episode if error == episode.error else replace(episode, error=error)
    return replace(episode, error=error, info=cast("dict[str, Json]", map_text(episode.info, redact, keys=True)))
