"""Entries of zip archives; those of Zstandard are tested with the logs of inspect_ai."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from rlkit._util.files.zip_entries import list_entries, read_entry


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_an_entry_is_read_up_to_its_limit(tmp_path: Path, method: int) -> None:
    path = tmp_path / "archive.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a/é", b"x" * 1000)
    assert list_entries(path) == {"a/é"}
    assert read_entry(path, "a/é", max_bytes=1000) == b"x" * 1000
    with pytest.raises(ValueError, match="it has more than 999 bytes"):
        read_entry(path, "a/é", max_bytes=999)


def test_what_is_wrong_with_an_archive_is_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "archive.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(range(256)))
    data = path.read_bytes()
    with pytest.raises(ValueError, match="no item named 'b'"):
        read_entry(path, "b", max_bytes=10)
    for size in range(0, len(data), 5):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError):
            list_entries(path)
        with pytest.raises(ValueError):
            read_entry(path, "a", max_bytes=1000)
