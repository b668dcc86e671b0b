"""An episode as bytes, exactly.

Invariant: `decode(encode(e))` equals `e` in every array, bit for bit, and in every number and text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlkit.types import Episode, Image, Prompt, StopReason, Turn

EPISODE_FIELDS = tuple(field.name for field in fields(Episode) if field.name != "turns")
"""The fields of an episode but for its turns."""

_HEADER_BYTES = 4
_MARKER = "group_scored"
_NO_FLAGS = np.empty(0, np.bool_)
_ENCODER = json.JSONEncoder(default=repr, separators=(",", ":"))


def encode(episode: Episode) -> bytes:
    """Return the header as JSON, then all prompts, completions, log-probabilities, flags and images, array by array.

    Tokens are int32, log-probabilities float32, flags a bit each; everything is little-endian.
    """
    turns = episode.turns
    header: dict[str, object] = {name: getattr(episode, name) for name in EPISODE_FIELDS}
    header["turns"] = [_head(turn) for turn in turns]
    text = to_json(header).encode()
    parts: list[bytes | NDArray[Any]] = [
        len(text).to_bytes(_HEADER_BYTES, "little"),
        text,
        *[np.ascontiguousarray(turn.prompt.tokens, "<i4") for turn in turns],
        *[np.ascontiguousarray(turn.completion, "<i4") for turn in turns],
        *[np.ascontiguousarray(turn.logprobs, "<f4") for turn in turns],
        np.packbits(np.concatenate([_NO_FLAGS, *[turn.sampled for turn in turns]])),
        *[image.data for turn in turns for image in turn.prompt.images],
    ]
    return b"".join(parts)  # pyright: ignore[reportArgumentType]  it takes whatever has a buffer


def decode(data: bytes) -> Episode:
    """Return the episode that `encode` wrote."""
    end = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
    header = json.loads(data[_HEADER_BYTES:end])
    heads = [_Head(*head) for head in header["turns"]]
    rest = _Reader(data, end)
    prompts = [rest.take("<i4", head.prompt).astype(np.int32) for head in heads]
    completions = [rest.take("<i4", head.completion).astype(np.int32) for head in heads]
    logprobs = [rest.take("<f4", head.completion).astype(np.float32) for head in heads]
    count = sum(len(completion) for completion in completions)
    flags = np.unpackbits(rest.take("u1", -(-count // 8)), count=count).astype(np.bool_)
    sampled = np.split(flags, np.cumsum([len(completion) for completion in completions])[:-1]) if heads else []
    turns = [
        Turn(
            prompt=Prompt(prompt, tuple(_image(image, rest) for image in head.images)),
            completion=completion,
            logprobs=logprob,
            sampled=flag,
            stop=head.stop,
            version=head.version,
            parent=head.parent,
            reward=head.reward,
            seconds=head.seconds,
            request_id=head.request_id,
        )
        for head, prompt, completion, logprob, flag in zip(heads, prompts, completions, logprobs, sampled, strict=True)
    ]
    header["metrics"], header["group_scored"] = split_group_scored(header["metrics"], header.get("group_scored"))
    return Episode(turns=tuple(turns), **{name: header[name] for name in EPISODE_FIELDS})


def split_group_scored(metrics: Mapping[str, float], group_scored: bool | None) -> tuple[Mapping[str, float], bool]:
    """Return the metrics of an episode, and whether the comparison of its group gave its reward.

    Records of earlier releases have no field `group_scored`: they mark the episode with a metric of that name, 1.
    """
    if group_scored is not None:
        return metrics, group_scored
    marked = metrics.get(_MARKER) == 1.0
    return {name: value for name, value in metrics.items() if not marked or name != _MARKER}, marked


def to_json(value: Mapping[str, object]) -> str:
    """JSON on one line; what JSON cannot hold is written as its `repr`."""
    return _ENCODER.encode(value) if value else "{}"  # as most are


type _ImageHead = tuple[int, int, int, Literal["png", "jpeg"]]
"""Start, length, bytes and format."""


class _Head(NamedTuple):
    """A turn but for its arrays and the bytes of its images: a list in JSON, which is written faster than an object."""

    prompt: int
    completion: int
    stop: StopReason
    version: int
    parent: int | None
    reward: float | None
    seconds: float
    request_id: str | None
    images: Sequence[_ImageHead]


def _head(turn: Turn) -> _Head:
    images: list[_ImageHead] = [
        (image.start, image.length, len(image.data), image.format) for image in turn.prompt.images
    ]
    return _Head(
        len(turn.prompt),
        len(turn.completion),
        turn.stop,
        turn.version,
        turn.parent,
        turn.reward,
        turn.seconds,
        turn.request_id,
        images,
    )


class _Reader:
    """Takes arrays off a buffer, one after another."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._at = start

    def take(self, dtype: str, count: int) -> NDArray[Any]:
        found = np.frombuffer(self._data, dtype, count, self._at)
        self._at += found.nbytes
        return found

    def raw(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found


def _image(head: _ImageHead, rest: _Reader) -> Image:
    start, length, count, encoding = head
    return Image(start, length, rest.raw(count), encoding)
