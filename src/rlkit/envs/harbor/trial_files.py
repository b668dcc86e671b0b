"""Files of a Harbor trial that an episode kept: the terminal's session, the verifier's output, the artefacts.

Invariant: no file outside the trial's folder is read, whatever a name or a link says.
"""

from __future__ import annotations

from collections.abc import Mapping
from os.path import isfile
from pathlib import Path
from typing import Any

from rlkit.errors import UsageError

_FILES_MAX = 300
_TEXT_BYTES = 1 << 20


def list_files(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the files of an episode's trial, if its folder was kept."""
    folder = _find_folder(info)
    if folder is None:
        return []
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [
        {"name": path.name, "path": name, "bytes": path.stat().st_size}
        for path in paths[:_FILES_MAX]
        if (name := str(path.relative_to(folder))).encode(errors="ignore").decode() == name  # others fit in no link
    ]


def read_file(info: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the text of a file of the trial, at most a megabyte of it."""
    folder = _find_folder(info)
    path = None if folder is None else (folder / name).resolve()
    if folder is None or path is None or not path.is_relative_to(folder) or not path.is_file():
        raise UsageError(f"the episode has no file {name!r}")
    with path.open("rb") as file:
        data = file.read(_TEXT_BYTES + 1)
    return {"text": data[:_TEXT_BYTES].decode(errors="replace"), "truncated": len(data) > _TEXT_BYTES}


def _find_folder(info: Mapping[str, Any]) -> Path | None:
    """Return the folder of a trial that still exists; a folder without a trial's result is none."""
    name = info.get("trial")
    if not isinstance(name, str) or not name:
        return None
    is_trial = isfile(f"{name}/result.json")  # noqa: PTH113  no error for a name that no file can have
    return Path(name).resolve() if is_trial else None
