"""Binary encoding of an episode.

Invariant: `decode(encode(e))` equals `e` in every array, bit for bit, and in every number and text.
A value that JSON cannot hold comes back as its `repr`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlkit.types import Episode, Image, Prompt, Turn

EPISODE_FIELDS = tuple(field.name for field in fields(Episode) if field.name != "turns")
"""Fields of an episode except its turns."""

TURN_FIELDS = ("stop", "version", "parent", "reward", "seconds", "request_id")
"""Fields of a turn except its prompt, its arrays and its messages."""

LATER_TURN_FIELDS = {"role": None, "frozen": False}
"""Fields of a turn that earlier releases did not record, with their values there."""

_IMAGES = 2 + len(TURN_FIELDS)  # place of the images in a turn's header

_HEADER_BYTES = 4
_NO_MASK = np.empty(0, np.bool_)
_ENCODER = json.JSONEncoder(default=repr, separators=(",", ":"))
_turn_values = attrgetter(*TURN_FIELDS)


def encode(episode: Episode) -> bytes:
    """Return a JSON header, then the arrays: all prompts, completions, log-probabilities, sampled masks and images.

    Tokens are int32, log-probabilities float32, masks one bit per token; everything is little-endian. The header of a
    turn is a list, because a list is written faster than an object: the lengths of prompt and completion,
    `TURN_FIELDS`, start, length, bytes and format of each image, the messages, and `LATER_TURN_FIELDS`.
    """
    turns = episode.turns
    header: dict[str, object] = {name: getattr(episode, name) for name in EPISODE_FIELDS}
    header["turns"] = [
        (
            len(turn.prompt),
            len(turn.completion),
            *_turn_values(turn),
            [(image.start, image.length, len(image.data), image.format) for image in turn.prompt.images],
            turn.messages,
            turn.role,
            turn.frozen,
        )
        for turn in turns
    ]
    text = to_json(header).encode()
    parts: list[bytes | NDArray[Any]] = [
        len(text).to_bytes(_HEADER_BYTES, "little"),
        text,
        *[np.ascontiguousarray(turn.prompt.tokens, "<i4") for turn in turns],
        *[np.ascontiguousarray(turn.completion, "<i4") for turn in turns],
        *[np.ascontiguousarray(turn.logprobs, "<f4") for turn in turns],
        np.packbits(np.concatenate([_NO_MASK, *[turn.sampled_mask for turn in turns]])),
        *[image.data for turn in turns for image in turn.prompt.images],
    ]
    return b"".join(parts)  # pyright: ignore[reportArgumentType]  it takes whatever has a buffer


def decode(data: bytes) -> Episode:
    """Return the episode that `encode` wrote."""
    offset = _HEADER_BYTES + int.from_bytes(data[:_HEADER_BYTES], "little")
    header = json.loads(data[_HEADER_BYTES:offset])

    def read_array(dtype: str, count: int) -> NDArray[Any]:
        nonlocal offset
        array = np.frombuffer(data, dtype, count, offset)
        offset += array.nbytes
        return array

    def read_image(start: int, length: int, size: int, kind: Literal["png", "jpeg"]) -> Image:
        return Image(start, length, read_array("u1", size).tobytes(), kind)

    heads = header["turns"]
    sizes = [head[1] for head in heads]
    prompts = [read_array("<i4", head[0]).astype(np.int32) for head in heads]
    completions = [read_array("<i4", size).astype(np.int32) for size in sizes]
    logprobs = [read_array("<f4", size).astype(np.float32) for size in sizes]
    mask = np.unpackbits(read_array("u1", -(-sum(sizes) // 8)), count=sum(sizes)).astype(np.bool_)
    sampled = np.split(mask, np.cumsum(sizes)[:-1]) if heads else []
    images = [tuple(read_image(*place) for place in head[_IMAGES]) for head in heads]
    turns = [
        Turn(
            prompt=Prompt(prompts[i], images[i]),
            completion=completions[i],
            logprobs=logprobs[i],
            sampled_mask=sampled[i],
            **dict(zip(TURN_FIELDS, head[2:_IMAGES], strict=True)),
            messages=tuple(head[_IMAGES + 1]) if len(head) > _IMAGES + 1 else (),  # earlier releases have none
            **dict(zip(LATER_TURN_FIELDS, head[_IMAGES + 2 :], strict=False)),
        )
        for i, head in enumerate(heads)
    ]
    return Episode(turns=tuple(turns), **{name: header[name] for name in EPISODE_FIELDS if name in header})


def to_json(value: Mapping[str, object] | Sequence[object]) -> str:
    """Return JSON on one line; a value that JSON cannot represent is written as its `repr`."""
    return _ENCODER.encode(value) if value else "{}"  # most mappings are empty
