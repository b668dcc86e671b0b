"""Runs with hostile text in every place, written by the writers of the store."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Sequence
from itertools import batched
from pathlib import Path

import numpy as np

from rlkit.config.loading.load import load_config
from rlkit.store import RunStore, table
from rlkit.store.history import table_path
from rlkit.store.table import RecordedGroup
from rlkit.token_records.pieces import PieceWriter, pieces_path
from rlkit.types import Episode, Group, Image, Message, Prompt, TokenPiece, Turn
from tests.view.browser.hostile_texts import CONTROLS, NAMES, RUN_NAMES, TEXTS

MEMBERS = 8
SHORT = 300
"""Characters of a text in places that hold names."""


def make_png() -> bytes:
    """Return a picture of one red pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\x00\xff\x00\x00")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def make_turn(text: str, token: int) -> Turn:
    """Return a turn with a text as a prompt, thinking, reply, call and result of a tool; a token has it as its text."""
    short = text[:SHORT]
    image = Image(2, 1, make_png(), "png")
    messages: list[Message] = [
        {"role": "system", "content": text},
        {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "image": "#0"}]},
        {"role": "user", "content": [{"type": "image", "image": text[:SHORT]}]},
        {"role": "tool", "content": text, "tool_call_id": short, "name": short},
        {
            "role": "assistant",
            "content": text,
            "thinking": text,
            "tool_calls": [{"id": short, "name": short, "arguments": {short: text}}],
        },
    ]
    ids = np.array([token, token, token + 1], np.int32)
    return Turn(
        prompt=Prompt(np.array([token, token + 1, -1], np.int32), (image,)),
        completion=ids,
        logprobs=np.array([0.0, -0.5, -2.0], np.float32),
        sampled_mask=np.array([False, True, True]),
        stop="stop",
        version=0,
        messages=tuple(messages),
    )


def make_episode(text: str, number: int, member: int) -> Episode:
    """Return an episode with a text in each of its fields; each fifth has failed."""
    is_failed = number % 5 == 4
    error = f"ValueError: {text[:5000]}\nTraceback (most recent call last):\n  File {text[:100]!r}\n{text[:5000]}"
    return Episode(
        member=member,
        attempt=0,
        turns=(make_turn(text, number),),
        status="failed" if is_failed else "truncated" if number % 7 == 0 else "completed",
        reward=None if is_failed else (number % 4) / 3,
        metrics={text[:SHORT]: 1.0},
        info={text[:SHORT]: text[:100_000], "nested": {"list": [text[:SHORT]]}},
        seconds=1.0,
        error=escape(error) if is_failed else None,
        masked=number % 6 == 0,
    )


def write_hostile_run(directory: Path, *, texts: Sequence[str] = TEXTS) -> Path:
    """Write a run whose every task holds some of the texts."""
    groups = list[RecordedGroup]()
    for draw, members in enumerate(batched(enumerate(texts), MEMBERS)):
        episodes = tuple(make_episode(text, number, member) for member, (number, text) in enumerate(members))
        env, task = members[0][1][:SHORT], members[-1][1][:SHORT]
        groups.append(RecordedGroup(Group(escape(env), escape(task), draw, episodes), True, episodes))
    for draw, name in enumerate(NAMES, len(groups)):
        episodes = (make_episode(name, 0, 0), make_episode(name, 1, 1))
        groups.append(RecordedGroup(Group(name, name, draw, episodes), True, episodes))
    resolved = load_config([], settings={"model": f"{texts[0]} model", "envs": {"env": {"env": texts[0]}}, "steps": 2})
    with RunStore(directory, resolved=resolved) as store:
        pieces = PieceWriter(pieces_path(directory), lambda token: make_piece(texts, token))
        turns = [turn for group in groups for episode in group.attempts for turn in episode.turns]
        pieces.add(tokens for turn in turns for tokens in (turn.prompt.tokens, turn.completion))
        table.write(table_path(directory, 1), groups)
        table.write(table_path(directory, 1, kind="evaluation"), groups[-4:])
        metrics = {f"env/{escape(text[:60])}/reward/mean": 0.5 for text in texts} | {"env/all/reward/mean": 0.5}
        store.add_metrics(1, metrics)
        store.add_metrics(2, metrics)
    path = directory / "run.json"
    about = json.loads(path.read_text())
    finding = {"first": 1, "last": 2, "name": texts[0], "env": texts[1], "evidence": texts[2], "action": texts[3]}
    about |= {
        "status": "failed",
        "error": "\n".join(escape(text[:SHORT]) for text in texts[:20]),
        "findings": [finding],
        "versions": {texts[0]: texts[1]},
        "identity": {"model": escape(CONTROLS[0]), "envs": [escape(text[:SHORT]) for text in texts[:5]]},
    }
    path.write_text(json.dumps(about))
    return directory


def make_piece(texts: Sequence[str], token: int) -> TokenPiece:
    """Return a text as the piece of a token; some are special, and some are no whole character."""
    text = texts[token % len(texts)][:5000]
    data = text.encode(errors="surrogatepass")
    return TokenPiece(data[:-1] if token % 9 == 8 else data, token % 10 == 9)


def escape(text: str) -> str:
    """Return a text that UTF-8 can encode."""
    return text.encode(errors="backslashreplace").decode()


def write_hostile_runs(runs: Path) -> Path:
    """Write a run with all texts, and small ones whose folders have hostile names."""
    write_hostile_run(runs / "hostile")
    for name in RUN_NAMES:
        write_hostile_run(runs / name, texts=TEXTS[:8])
    picture = base64.b64encode(make_png()).decode()
    folder = runs / "hostile" / "artefacts" / "search"
    folder.mkdir(parents=True)
    record = {
        **{name: TEXTS[place] for place, name in enumerate(("problem", "symbol", "task", "parent", "program"))},
        "value": 1.0,
        "polished": False,
        "values": [0.5, 1.0],
        "certificate": {"claim": TEXTS[20]},
    }
    (folder / "0001-x.record.json").write_text(json.dumps(record))
    (folder / "0001-x.png").write_bytes(base64.b64decode(picture))
    return runs
