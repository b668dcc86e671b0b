"""pieces.jsonl: the text of each token id that occurs in a run, so that readers need no tokenizer.

Invariant: a token of a table has its piece on the disk before the table is written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np

from rlkit._util import files
from rlkit._util.files import json_lines
from rlkit.errors import UsageError
from rlkit.types import Json, TokenPiece, Tokens


def pieces_path(directory: Path) -> Path:
    """Return the path of the pieces of a run."""
    return directory / "pieces.jsonl"


@dataclass(eq=False)
class PieceWriter:
    """Writer of the pieces of a run, by `piece` of a token; a damaged file is written anew."""

    path: Path
    piece: Callable[[int], TokenPiece]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._is_known = np.zeros(0, np.bool_)
        try:
            json_lines.repair(self.path)
            tokens = np.array(list(read_pieces(self.path)), np.int64)
        except UsageError:
            self.path.unlink()
            return
        self._is_known = np.zeros(int(tokens.max(initial=-1)) + 1, np.bool_)
        self._is_known[tokens] = True

    def add(self, arrays: Iterable[Tokens]) -> None:
        """Write the pieces of the tokens that are new; images have none."""
        tokens = np.concatenate([np.empty(0, np.int32), *arrays])
        with self._lock:
            missing = int(tokens.max(initial=-1)) + 1 - len(self._is_known)
            if missing > 0:
                self._is_known = np.concatenate([self._is_known, np.zeros(missing, np.bool_)])
            new = np.unique(tokens[~self._is_known[tokens] & (tokens >= 0)]).tolist()
            if not new:
                return
            pieces = {token: self.piece(token) for token in new}
            texts: dict[str, Json] = {str(token): piece_to_json(piece.data) for token, piece in pieces.items()}
            special = [token for token, piece in pieces.items() if piece.is_special]
            with files.report_write_errors(self.path.parent):
                json_lines.append(self.path, {"pieces": texts, "special": special})
            self._is_known[new] = True


def read_pieces(path: Path) -> dict[int, TokenPiece]:
    """Return the pieces in a file by token; none if it does not exist; raise `UsageError` if it is damaged."""
    pieces = dict[int, TokenPiece]()
    for line in json_lines.read_lines(path):
        try:
            special = set(cast("list[int]", line["special"]))
            for key, text in cast("dict[str, str | list[int]]", line["pieces"]).items():
                data = text.encode() if isinstance(text, str) else bytes(text)
                pieces[int(key)] = TokenPiece(data, int(key) in special)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{path} is damaged: a line holds no pieces") from error
    return pieces


def decode_pieces(pieces: Mapping[int, TokenPiece], tokens: Iterable[int], *, with_special: bool = True) -> str:
    """Return the text of tokens; an unknown token is its number, such as `<7>`."""
    shown_pieces = (pieces.get(token) or TokenPiece(f"<{token}>".encode(), False) for token in tokens)
    return b"".join(piece.data for piece in shown_pieces if with_special or not piece.is_special).decode(
        errors="replace"
    )


def piece_to_json(data: bytes) -> Json:
    """Return the text of a piece, or its bytes if it is no whole character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
