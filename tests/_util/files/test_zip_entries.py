"""Entries of zip archives; those of Zstandard are tested with the logs of inspect_ai."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from rlkit._util.files.zip_entries import list_entries, read_entry
from rlkit.errors import UsageError


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_an_entry_is_read_up_to_its_limit(tmp_path: Path, method: int) -> None:
    path = tmp_path / "archive.zip"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a/é", b"x" * 1000)
    assert list_entries(path) == {"a/é"}
    assert read_entry(path, "a/é", max_bytes=1000) == b"x" * 1000
    with pytest.raises(UsageError, match="it has more than 999 bytes"):
        read_entry(path, "a/é", max_bytes=999)


def test_what_is_wrong_with_an_archive_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "archive.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(range(256)))
    data = path.read_bytes()
    with pytest.raises(UsageError, match="no item named 'b'"):
        read_entry(path, "b", max_bytes=10)
    for size in range(0, len(data), 5):
        path.write_bytes(data[:size])
        with pytest.raises(UsageError, match=r"archive\.zip is damaged"):
            list_entries(path)
        with pytest.raises(UsageError, match=r"archive\.zip is damaged"):
            read_entry(path, "a", max_bytes=1000)
