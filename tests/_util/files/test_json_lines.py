"""Lines are on the disk once they are appended, and an incomplete one is dropped."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from rlkit._util.files import json_lines
from rlkit.errors import UsageError
from tests._util.files.disk import Disk, files_of_at_most


def test_a_failed_append_is_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    json_lines.append(path, {"step": 1})
    whole = path.read_bytes()
    with files_of_at_most(len(whole) + 5), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        json_lines.append(path, {"step": 2})
    assert path.read_bytes() == whole
    json_lines.append(path, {"step": 3})
    assert json_lines.read_lines(path) == [{"step": 1}, {"step": 3}]


def test_the_first_line_of_a_file_flushes_its_name(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for number in range(2):
        json_lines.append(path, {"step": number})
        disk.assert_holds(path)


def test_lines_of_a_killed_process_are_flushed_by_the_repair(disk: Disk, tmp_path: Path) -> None:
    for name, text in {"whole": "{}\n", "torn": '{}\n{"st'}.items():
        path = tmp_path / name
        path.write_text(text)
        json_lines.repair(path)
        disk.assert_holds(path)
        assert json_lines.read_lines(path) == [{}]


def test_a_line_ends_at_a_line_feed_only(tmp_path: Path) -> None:
    path, text = tmp_path / "lines.jsonl", "a\u2028b\u2029c\u0085d"
    path.write_text(f'{{"text": "{text}"}}\n{{"step": 2}}\n{{"st')
    assert json_lines.read_lines(path) == [{"text": text}, {"step": 2}]


@pytest.mark.parametrize("text", ["[", '{"a":'])
def test_an_object_that_is_nested_too_deeply_is_damage(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"a": {text * 100_000}\n')
    for read in (json_lines.read_lines, json_lines.read_object):
        with pytest.raises(UsageError, match=r"lines\.jsonl is damaged: .* is not a JSON object"):
            read(path)


def test_the_ends_of_a_long_file_are_its_first_and_last_lines_with_a_text(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert json_lines.read_ends(path, {'"a/': False, '"c/': True}) == [({}, {})] * 2
    lines = [{"step": step, ("a/x" if 5 < step < 995 else "b/x"): "x" * 1000} for step in range(1000)]
    lines[400]["c/x"] = lines[600]["c/x"] = 1
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 1000, "a/x": ')
    assert json_lines.read_ends(path, {'"c/': False}) == [({}, {})]
    ends = json_lines.read_ends(path, {'"a/': False, '"c/': True, '"b/': True})
    assert [(first["step"], last["step"]) for first, last in ends] == [(6, 994), (400, 600), (0, 999)]
    path.write_text('{"a/x": \n')
    with pytest.raises(UsageError, match=r"lines\.jsonl is damaged"):
        json_lines.read_ends(path, {'"a/': False})
