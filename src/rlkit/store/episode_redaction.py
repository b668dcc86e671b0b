"""Episodes without secrets.

Invariant: no text that an environment gave an episode, keys of its info included, keeps a secret. What the model was
given and said stays as it was: it is what the run trains on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rlkit.types import Episode, Json


def redact_episode(episode: Episode, redactor: Callable[[], Callable[[str], str]]) -> Episode:
    """Return the episode with the secrets taken out of its error and its info.

    The secrets are read, by `redactor`, only where there is text: that takes longer than most rollouts' own work.
    """
    if episode.error is None and not episode.info:
        return episode
    redacted = redactor()
    error = None if episode.error is None else redacted(episode.error)
    text = "\n".join(_texts(episode.info))
    if redacted(text) == text:  # as nearly always: one long text takes a fraction of the time of many short ones
        return episode if error == episode.error else replace(episode, error=error)
    return replace(episode, error=error, info={redacted(k): _redacted(v, redacted) for k, v in episode.info.items()})


def _texts(value: Json) -> Iterator[str]:
    """The texts in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)


def _redacted(value: Json, redacted: Callable[[str], str]) -> Json:
    """A value of JSON with every text in it redacted, keys included."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {redacted(key): _redacted(inner, redacted) for key, inner in value.items()}
    if isinstance(value, Sequence):
        return [_redacted(inner, redacted) for inner in value]
    return value
