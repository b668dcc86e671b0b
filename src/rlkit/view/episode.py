"""A group with its messages, and an episode token for token.

Invariant: a token is shown with the numbers that were recorded for it, at its place in its turn.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkit._util.paths import ARTEFACTS
from rlkit.token_records.pictures import VIEW_SCRIPT
from rlkit.token_records.pieces import decode_pieces, pieces_path
from rlkit.token_records.updates import RecordedUpdate, update_path
from rlkit.view.records.reader import Place
from rlkit.view.tables import Kind, Row, find_table, read_episodes, read_texts, read_updates
from rlkit.view.trial_files import list_files

_DIGITS = 5
"""Decimals of log-probabilities and advantages on the page."""


def read_replies(
    directory: Path, kind: Kind, number: int, places: Sequence[Place]
) -> list[tuple[list[Row], Row, str | None]]:
    """Return messages, info and error of the episodes of a group."""
    rows = _read_rows(directory, kind, number, places[0][0]) if places else {}
    pieces = read_texts(pieces_path(directory))
    episodes = [rows[place] for place in places]
    return [(_list_messages(row["turns"], pieces), json.loads(row["info"]), row["error"]) for row in episodes]


def read_details(directory: Path, kind: Kind, number: int, place: Place) -> Row:
    """Return the turns of an episode, the text of its tokens, and what its environment recorded."""
    row = _read_rows(directory, kind, number, place[0])[place]
    updates = read_updates(update_path(directory, number)) if kind == "step" and row["final"] else {}
    pieces = read_texts(pieces_path(directory))
    turns = _list_turns(row["turns"], updates.get(row["draw"]), place[1], pieces)
    used = {token for turn in turns for token in (*turn["prompt"], *turn["completion"])}
    shown = {token: pieces[token] for token in used if token in pieces}
    info = json.loads(row["info"])
    return {
        "error": row["error"],
        "info": info,
        "turns": turns,
        "pieces": {str(token): _show_bytes(piece.data) for token, piece in shown.items()},
        "special": [token for token, piece in shown.items() if piece.is_special],
        "files": list_files(info),
        "view": _find_view(info, directory / ARTEFACTS / row["env"] / VIEW_SCRIPT),
    }


def _read_rows(directory: Path, kind: Kind, number: int, position: int) -> dict[Place, Row]:
    rows = read_episodes(find_table(directory, kind, number), position)
    return {(position, row["member"], row["attempt"]): row for row in rows}


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
            "logprobs": _numbers(np.array(turn["logprobs"], np.float64)),
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
        if parent not in range(path[-1]):
            raise ValueError(f"turn {path[-1]} continues turn {parent}")
        path.append(parent)
    return path[::-1]


def _ranges(flags: NDArray[np.bool_]) -> list[list[int]]:
    """Return start and end of each run of True."""
    changes = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return changes.reshape(-1, 2).tolist()


def _numbers(values: NDArray[np.float64]) -> list[float | None]:
    """Return rounded numbers, None where there is none or an infinite one."""
    return np.where(np.isfinite(values), np.round(values, _DIGITS), np.array(None)).tolist()


def _show_bytes(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _find_view(info: Mapping[str, Any], script: Path) -> Row | None:
    """Return what an environment draws itself: HTML of the episode, or a script of the run that draws episodes."""
    view = info.get("view")
    if isinstance(view, dict) and isinstance(view.get("html") or view.get("script"), str):
        return {name: view[name] for name in ("html", "script") if isinstance(view.get(name), str)}
    is_own = script.is_file() and script.resolve().is_relative_to(script.parents[2].resolve())
    return {"script": script.read_text(errors="replace")} if is_own else None
