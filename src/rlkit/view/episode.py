"""A group with its messages, and an episode token for token.

Invariant: a token is shown with the numbers that were recorded for it, at its place in its turn.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkit.errors import UsageError
from rlkit.token_records.pieces import decode_pieces, pieces_path, read_pieces
from rlkit.token_records.updates import RecordedUpdate, read_update, update_path
from rlkit.view.group import make_group
from rlkit.view.tables import Kind, Row, find_table, read_episodes, read_members
from rlkit.view.trial_files import list_files

_DIGITS = 5
"""Decimals of log-probabilities and advantages on the page."""


def read_group(directory: Path, kind: Kind, number: int, position: int) -> Row:
    """Return a group with the messages that its episodes share, and the other messages of each."""
    group, episodes, _ = _find_group(directory, kind, number, position)
    pieces = read_pieces(pieces_path(directory))
    texts = [_list_messages(row["turns"], pieces) for row in episodes]
    rows = zip(*filter(None, texts), strict=False)  # an episode that failed early may have no message
    shared = [row[0] for row in takewhile(lambda row: "turn" not in row[0] and row.count(row[0]) == len(row), rows)]
    replies = [
        {
            "member": row["member"],
            "attempt": row["attempt"],
            "messages": messages[len(shared) :],
            "info": json.loads(row["info"]),
            "error": row["error"],
        }
        for row, messages in zip(episodes, texts, strict=True)
    ]
    return {**group, "prompt": shared, "replies": replies}


def read_episode(directory: Path, kind: Kind, number: int, place: tuple[int, int, int]) -> Row:
    """Return an episode with its turns, the text of its tokens, and its neighbours in the step.

    Args:
        place: position of the group, member and attempt.
    """
    position, member, attempt = place
    group, episodes, update = _find_group(directory, kind, number, position)
    row = next((row for row in episodes if (row["member"], row["attempt"]) == (member, attempt)), None)
    if row is None:
        raise UsageError(f"group {position} of {kind} {number} has no member {member}, attempt {attempt}")
    pieces = read_pieces(pieces_path(directory))
    turns = _list_turns(row["turns"], update if row["final"] else None, member, pieces)
    used = {token for turn in turns for token in (*turn["prompt"], *turn["completion"])}
    shown = {token: pieces[token] for token in used if token in pieces}
    rows = read_members(find_table(directory, kind, number))
    places = sorted([each["position"], each["member"], each["attempt"]] for each in rows)
    index = places.index([*place])
    previous, following = ([None, *places, None][index + offset] for offset in (0, 2))
    info = json.loads(row["info"])
    names = ("draw", "env", "task", "taught", "reason", "estimator", "baseline")
    return {
        **{name: group[name] for name in names},
        **{name: row[name] for name in ("member", "attempt", "status", "reward", "error", "seconds", "masked")},
        **{"step": number, "kind": kind, "position": position, "metrics": json.loads(row["metrics"]), "info": info},
        "neighbours": {"previous": previous, "next": following},
        "turns": turns,
        "pieces": {str(token): _show_bytes(piece.data) for token, piece in shown.items()},
        "special": [token for token, piece in shown.items() if piece.is_special],
        "files": list_files(info),
        "view": _find_view(info),
    }


def _find_group(
    directory: Path, kind: Kind, number: int, position: int
) -> tuple[Row, list[Row], RecordedUpdate | None]:
    path = find_table(directory, kind, number)
    attempts = [row for row in read_members(path) if row["position"] == position]
    if not attempts:
        raise UsageError(f"{kind} {number} has no group {position}")
    updates = read_update(update_path(directory, number)) if kind == "step" else None
    episodes = sorted(read_episodes(path, position), key=lambda row: (row["member"], row["attempt"]))
    return make_group(attempts, updates), episodes, (updates or {}).get(attempts[0]["draw"])


def _list_messages(turns: Sequence[Row], pieces: Mapping[int, Any]) -> list[Row]:
    return [message for index, turn in enumerate(turns) for message in _turn_messages(index, turn, pieces)]


def _turn_messages(index: int, turn: Row, pieces: Mapping[int, Any]) -> list[Row]:
    """Return the messages that a turn adds, its reply last; texts of its tokens if it has no messages."""
    if turn.get("messages"):
        messages = json.loads(turn["messages"])
        images = [_data_uri(image) for image in turn["images"] or ()]
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = [_place_image(part, images) for part in message["content"]]
    else:
        # Tables of earlier releases have texts.
        texts = [turn.get(f"{name}_text") or decode_pieces(pieces, turn[name]) for name in ("prompt", "completion")]
        messages = [{"role": "prompt", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    return [*messages[:-1], {**messages[-1], "turn": index}]


def _place_image(part: Row, images: Sequence[str]) -> Row:
    number = str(part.get("image", ""))[1:]
    return {**part, "image": images[int(number)]} if number.isdigit() and int(number) < len(images) else part


def _data_uri(image: Row) -> str:
    return f"data:image/{image['format']};base64,{base64.b64encode(image['data']).decode()}"


def _list_turns(
    turns: Sequence[Row], update: RecordedUpdate | None, member: int, pieces: Mapping[int, Any]
) -> list[Row]:
    sizes = [len(turn["completion"]) for turn in turns]
    advantages, logprobs = ([np.full(size, np.nan) for size in sizes] for _ in range(2))
    places: list[int | None] = [None] * len(turns)
    for sequence in update.sequences if update is not None else ():
        if sequence.member != member:
            continue
        whole = np.full((2, len(sequence.mask)), np.nan)
        whole[:, sequence.mask] = sequence.advantages, sequence.logprobs
        start = -1  # position t of the targets is token t + 1
        for index in _list_path(turns, sequence.turn):
            start += len(turns[index]["prompt"])
            part = whole[:, start : start + sizes[index]]
            if np.isfinite(part[0]).any():  # a turn before a fork is trained in one sequence only
                advantages[index][: part.shape[1]], logprobs[index][: part.shape[1]] = part
                places[index] = sequence.position
            start += sizes[index]
    return [
        {
            **{name: turn[name] for name in ("parent", "version", "stop", "reward", "seconds", "prompt", "completion")},
            "messages": _turn_messages(index, turn, pieces),
            "sampled": _ranges(np.array(turn["sampled"], np.bool_)),
            "logprobs": [round(value, _DIGITS) for value in turn["logprobs"]],
            "trainer_logprobs": _numbers(logprobs[index]) if update is not None else None,
            "advantages": _numbers(advantages[index]) if update is not None else None,
            "datum": places[index],
            "images": [_data_uri(image) for image in turn["images"] or ()],
        }
        for index, turn in enumerate(turns)
    ]


def _list_path(turns: Sequence[Row], last: int) -> list[int]:
    """Return the turns from the first of a segment to `last`."""
    path = [last]
    while (parent := turns[path[-1]]["parent"]) is not None:
        path.append(parent)
    return path[::-1]


def _ranges(flags: NDArray[np.bool_]) -> list[list[int]]:
    """Return start and end of each run of True."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return changes.reshape(-1, 2).tolist()


def _numbers(values: NDArray[np.float64]) -> list[float | None]:
    """Return rounded numbers, None where there is none or an infinite one."""
    return [value if np.isfinite(value) else None for value in np.round(values, _DIGITS).tolist()]


def _show_bytes(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _find_view(info: Mapping[str, Any]) -> Row | None:
    """Return what an environment renders itself: HTML in `info["view"]["html"]`, or a script that draws the episode."""
    view = info.get("view")
    if isinstance(view, dict) and isinstance(view.get("html") or view.get("script"), str):
        return {name: view[name] for name in ("html", "script") if isinstance(view.get(name), str)}
    return None
