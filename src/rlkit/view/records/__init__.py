"""Records of other tools, shown on the same pages as runs of rlkit."""

from __future__ import annotations

from pathlib import Path

from rlkit.view.records.cookbook import CookbookReader
from rlkit.view.records.inspect import InspectReader
from rlkit.view.records.reader import RecordReader
from rlkit.view.records.verifiers import VerifiersReader

__all__ = ["RecordReader", "find_reader"]


def find_reader(path: Path) -> RecordReader | None:
    """Return the reader for the records at a path; None if they are of none of the tools."""
    if path.suffix == ".eval" and path.is_file():
        return InspectReader(path)
    names = ("traces.jsonl", "results.jsonl", "metadata.json", "metrics.jsonl", "config.json", "run.json")
    files = {name for name in names if (path / name).is_file()}
    if "traces.jsonl" in files or {"results.jsonl", "metadata.json"} <= files:
        return VerifiersReader(path)
    if {"metrics.jsonl", "config.json"} <= files and "run.json" not in files:  # rlkit's own has run.json
        return CookbookReader(path)
    return None
