"""Each token of a run has its text in pieces.jsonl."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from rlkit.chat.renderers import TemplateChat
from rlkit.errors import UsageError
from rlkit.testing import ByteChat, tiny_model
from rlkit.token_records.pieces import PieceWriter, decode_pieces, pieces_path, read_pieces
from rlkit.tokenizers.bundled import load_bundled_tokenizer
from rlkit.tokenizers.token_text import token_text
from rlkit.types import Tokens
from tests.builders import piece

TEXTS = ["plain words", " 中文 é∀🎉\n\t", "\u202e\u200b</textarea><script>", "\ud7ff\ue000"]


def tokens(*values: int) -> list[Tokens]:
    return [np.array(values, np.int32)]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_text_join_to_it(text: str, tmp_path: Path) -> None:
    qwen = load_bundled_tokenizer("Qwen/Qwen3-8B")
    assert qwen is not None
    tiny = AutoTokenizer.from_pretrained(tiny_model(tmp_path / "model"))
    for tokenizer in (qwen, tiny):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(token_text(tokenizer, token) for token in ids).decode() == text
    ids = ByteChat().encode(text)
    assert b"".join(ByteChat().piece(int(token)).data for token in ids).decode() == text


def test_special_tokens_keep_their_names() -> None:
    qwen = load_bundled_tokenizer("Qwen/Qwen3-8B")
    assert qwen is not None
    chat = TemplateChat(qwen)
    end = qwen.encode("<|im_end|>")
    assert [chat.piece(token) for token in end] == [(b"<|im_end|>", True)]
    prompt = ByteChat().render([{"role": "user", "content": "hé"}])
    pieces = {int(token): ByteChat().piece(int(token)) for token in prompt.tokens}
    assert decode_pieces(pieces, prompt.tokens.tolist()) == "<begin><user>hé<end>\n<assistant>"
    assert decode_pieces(pieces, prompt.tokens.tolist(), with_special=False) == "hé\n"
    assert decode_pieces({}, [7]) == "<7>"


def test_a_piece_is_written_once_also_by_a_later_process(tmp_path: Path) -> None:
    path = pieces_path(tmp_path)
    writer = PieceWriter(path, piece)
    writer.add(tokens(5, 3, 5, -1))
    writer.add(tokens(3, 5))
    PieceWriter(path, piece).add(tokens(3, 9))
    assert len(path.read_text().splitlines()) == 2
    assert read_pieces(path) == {token: piece(token) for token in (3, 5, 9)}


@pytest.mark.parametrize(
    "damage", ["{}\n", '{"pieces": {"x": "a"}, "special": []}\n', '{"pieces": {"1": [999]}, "special": 3}\n', "\xff\n"]
)
def test_a_damaged_file_is_named_and_written_anew(tmp_path: Path, damage: str) -> None:
    path = pieces_path(tmp_path)
    path.write_bytes(damage.encode("latin-1"))
    with pytest.raises(UsageError, match=r"pieces\.jsonl is damaged"):
        read_pieces(path)
    PieceWriter(path, piece).add(tokens(4))
    assert read_pieces(path) == {4: piece(4)}


def test_an_incomplete_last_line_is_dropped(tmp_path: Path) -> None:
    path = pieces_path(tmp_path)
    PieceWriter(path, piece).add(tokens(4))
    with path.open("a") as file:
        file.write('{"pieces": {"8": " 8')
    PieceWriter(path, piece).add(tokens(4, 8))
    assert read_pieces(path) == {4: piece(4), 8: piece(8)}
