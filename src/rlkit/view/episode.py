"""An episode token for token, and its messages alone.

Invariant: a token is shown with the numbers that were recorded for it, at its place in its turn.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlkit._util.files.json_fields import pick
from rlkit._util.paths import ARTEFACTS
from rlkit.envs.harbor.trial_files import list_files
from rlkit.token_records.pictures import VIEW_SCRIPT
from rlkit.token_records.pieces import decode_pieces, pieces_path
from rlkit.token_records.updates import RecordedSequence, place_numbers, update_path
from rlkit.types import TokenPiece
from rlkit.view.records.reader import Place, Row, Step, join_turns
from rlkit.view.tables import find_table, read_attempts, read_texts, read_updates

_TURN = ("parent", "version", "stop", "reward", "seconds", "prompt", "completion")
_DIGITS = 5
"""Decimals of log-probabilities and advantages on the page."""


def read_replies(directory: Path, step: Step, places: Sequence[Place]) -> list[Row]:
    """Return messages, info and error of the episodes of a group."""
    attempts = read_attempts(find_table(directory, step), places[0][0]) if places else {}
    pieces, replies = read_texts(pieces_path(directory)), list[Row]()
    for row in map(attempts.__getitem__, places):
        turns = enumerate(row["turns"])
        shown = [{**turn, "messages": _list_messages(turn, index, pieces)} for index, turn in turns]
        replies.append({"messages": join_turns(shown), "info": json.loads(row["info"]), "error": row["error"]})
    return replies


def read_episode(directory: Path, step: Step, place: Place) -> Row:
    """Return the turns of an episode, the text of its tokens, and what its environment recorded."""
    kind, number = step
    row = read_attempts(find_table(directory, step), place[0])[place]
    updates = read_updates(update_path(directory, number)) if kind == "step" and row["final"] else {}
    update = updates.get(row["draw"])
    sequences = None if update is None else [each for each in update.sequences if each.member == row["member"]]
    pieces, info = read_texts(pieces_path(directory)), json.loads(row["info"])
    used = {token for turn in row["turns"] for token in (*turn["prompt"], *turn["completion"])} & pieces.keys()
    return {
        "error": row["error"],
        "info": info,
        "turns": list(_list_turns(row["turns"], sequences, pieces)),
        "pieces": {str(token): _show_bytes(pieces[token].data) for token in used},
        "special": [token for token in used if pieces[token].is_special],
        "files": list_files(info),
        "view": _find_picture(info, directory, env=row["env"]),
    }


def _list_turns(
    turns: Sequence[Row], sequences: Sequence[RecordedSequence] | None, pieces: Mapping[int, TokenPiece]
) -> Iterator[Row]:
    """Yield each turn with the numbers of its tokens.

    Args:
        sequences: training sequences of the episode; None if no update of its group was recorded.
    """
    trained = place_numbers(sequences or (), turns)
    for index, turn in enumerate(turns):
        datum, numbers = trained.get(index, (None, np.full((2, len(turn["completion"])), np.nan)))
        yield {
            **{name: turn[name] for name in _TURN},
            "messages": _list_messages(turn, index, pieces),
            "sampled": _ranges(np.array(turn["sampled"], np.bool_) | bool(turn.get("frozen"))),  # by an opponent
            "logprobs": _show_numbers(np.array(turn["logprobs"], np.float64)),
            "demonstration": any(np.isnan(turn["logprobs"][:1])),
            "advantages": None if sequences is None else _show_numbers(numbers[0]),
            "trainer_logprobs": None if sequences is None else _show_numbers(numbers[1]),
            "datum": datum,
            "images": [_data_uri(image) for image in turn["images"] or ()],
        }


def _list_messages(turn: Row, index: int, pieces: Mapping[int, TokenPiece]) -> list[Row]:
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
    return [*messages[:-1], {**messages[-1], "turn": index, **({"name": turn["role"]} if turn.get("role") else {})}]


def _place_image(part: Row, images: Sequence[str]) -> Row:
    number = str(part.get("image", ""))[1:]
    return {**part, "image": images[int(number)]} if number.isdigit() and int(number) < len(images) else part


def _data_uri(image: Row) -> str:
    return f"data:image/{image['format']};base64,{base64.b64encode(image['data']).decode()}"


def _ranges(flags: NDArray[np.bool_]) -> list[list[int]]:
    """Return start and end of each run of True."""
    changes = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return changes.reshape(-1, 2).tolist()


def _show_numbers(values: NDArray[np.float64]) -> list[float | None]:
    """Return rounded numbers, None where there is none or an infinite one."""
    return np.where(np.isfinite(values), np.round(values, _DIGITS), np.array(None)).tolist()


def _show_bytes(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _find_picture(info: Row, directory: Path, *, env: str) -> Row | None:
    """Return what an environment draws itself: HTML of the episode, or a script of the run that draws episodes."""
    texts = {name: text for name in ("html", "script") if (text := pick(info, f"view.{name}", str))}
    if texts:
        return texts
    with suppress(OSError, ValueError):  # no file, or no name of a file
        script = (directory / ARTEFACTS / env / VIEW_SCRIPT).resolve(strict=True)
        if script.is_relative_to(directory.resolve()):
            return {"script": script.read_text(errors="replace")}
    return None
