"""Files of a build context that a Dockerfile copies.

Invariant: only files of the context that `.dockerignore` does not exclude are copied, even through links and `..`.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from rlkit.errors import UsageError
from rlkit.sandbox.dockerfile import Copy


@dataclass(frozen=True)
class Entry:
    """An item to copy to the target `name`: a file, folder or link of the context, or the text of a here-document."""

    name: str
    path: Path | None
    mode: int
    text: str = ""


def list_entries(step: Copy, context: Path) -> list[Entry]:
    """List the entries of a COPY in order; raise a UsageError if a source is not in the context."""
    if step.text is not None:
        name = step.target + step.sources[0].lstrip("<-'\"").rstrip("'\"") if step.target.endswith("/") else step.target
        return [Entry(name.lstrip("/"), None, step.mode or 0o644, step.text)]
    ignored = _Ignored(context / ".dockerignore")
    root = context.resolve()
    entries: list[Entry] = []
    for source in step.sources:
        relative = os.path.normpath(source.lstrip("/") or ".")
        if relative.startswith(".."):
            raise UsageError(f"{step.location}: {source} is outside the build context")
        paths = sorted(root.glob(relative)) if any(mark in relative for mark in "*?[") else [root / relative]
        paths = [path for path in paths if path.exists() and not ignored.excludes(os.path.relpath(path, root))]
        if not paths:
            raise UsageError(f"{step.location}: {source} is not in {context}, or .dockerignore excludes it")
        for path in paths:
            if not path.resolve().is_relative_to(root):
                raise UsageError(f"{step.location}: {source} leads out of {context}")
            entries += _list_below(path, root, step, ignored, has_several_sources=len(paths) > 1)
    return entries


def hash_entries(entries: list[Entry]) -> str:
    """Return a hash of names, modes and contents."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.name}\0{entry.mode:o}\0".encode())
        if entry.path is None:
            digest.update(hashlib.sha256(entry.text.encode()).digest())
        elif entry.path.is_symlink():
            digest.update(os.fsencode(entry.path.readlink()))
        elif entry.path.is_file():
            with entry.path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _list_below(path: Path, root: Path, step: Copy, ignored: _Ignored, *, has_several_sources: bool) -> list[Entry]:
    is_target_folder = step.target.endswith("/") or has_several_sources
    if not path.is_dir():
        name = f"{step.target.rstrip('/')}/{path.name}" if is_target_folder else step.target
        return [_make_entry(path.resolve(), name, step)]
    top = step.target.rstrip("/")
    entries = [Entry(top.lstrip("/"), path.resolve(), stat.S_IMODE(path.stat().st_mode))] if top else []
    for folder, folders, files in os.walk(path):
        included = [
            name for name in folders if ignored.may_include_descendants(str((Path(folder) / name).relative_to(root)))
        ]
        folders[:] = sorted(name for name in included if not (Path(folder) / name).is_symlink())
        for name in sorted([*included, *files]):
            inside = Path(folder) / name
            if not ignored.excludes(str(inside.relative_to(root))):
                entries.append(_make_entry(inside, f"{top}/{inside.relative_to(path)}", step))
    return entries


def _make_entry(path: Path, name: str, step: Copy) -> Entry:
    mode = stat.S_IMODE(path.lstat().st_mode)
    return Entry(name.lstrip("/"), path, step.mode if step.mode is not None and not path.is_dir() else mode)


class _Ignored:
    """The patterns of a .dockerignore: the last pattern that matches a path, or a parent folder of it, decides."""

    def __init__(self, path: Path) -> None:
        self._rules: list[tuple[bool, re.Pattern[str]]] = []
        for line in path.read_text().splitlines() if path.is_file() else []:
            text = line.strip()
            if text and not text.startswith("#"):
                is_exception, pattern = text.startswith("!"), text.lstrip("!").strip().strip("/")
                self._rules.append((is_exception, re.compile(_translate_glob(os.path.normpath(pattern)))))

    def excludes(self, path: str) -> bool:
        is_excluded = False
        for is_exception, pattern in self._rules:
            if pattern.fullmatch(path):
                is_excluded = not is_exception
        return is_excluded

    def may_include_descendants(self, folder: str) -> bool:
        return not self.excludes(folder) or any(is_exception for is_exception, _ in self._rules)


def _translate_glob(pattern: str) -> str:
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    text = ""
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", pattern):
        is_class = piece.startswith("[") and len(piece) > 1
        text += wildcards.get(piece) or (piece if is_class else re.escape(piece))
    return f"{text}(?:/.*)?"
