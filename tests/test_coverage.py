"""The page that says which test plays each feature of the predecessors: complete, and true of the tests there are."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from .doc_commands import ROOT, fenced_commands

PAGE = ROOT / "docs" / "migrating" / "coverage.md"
SPAN = re.compile(r"`([^`\n]+)`")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
PARSING = ("tests/config/", "tests/test_migrated.py", "tests/cli/test_imports.py", "tests/cli/test_config.py")
"""Tests of how configurations are read. None of them plays anything."""

SECTIONS = {
    "tinking": ("migrating/tinking.md", "## Setting up", "## Models"),
    "Terminal Bench Trainer": ("migrating/terminal-bench-trainer.md", "## Setting up", "## What is different"),
    "OpenReward's cookbook": ("migrating/openreward.md", "| cookbook | rlkit |", "## The documented runs"),
}
"""For each section of the page, the page with the predecessor's commands and options, and between which lines."""


def read_rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    return [
        row
        for row in cells
        if row[0] not in ("predecessor", "tinking", "tinking's page", "Terminal Bench Trainer", "cookbook")
    ]


def read_section(name: str) -> str:
    return PAGE.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]


COVERED = [row for name in SECTIONS for row in read_rows(read_section(name))]


@cache
def functions_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions) and node.name.startswith("test_"))


def test_every_section_has_rows_of_three_cells() -> None:
    assert len(COVERED) == PAGE.read_text().count("\n| ") - PAGE.read_text().count("\n| predecessor |")
    assert all(read_rows(read_section(name)) for name in SECTIONS)
    assert [row for row in COVERED if len(row) != 3] == []


@pytest.mark.parametrize("row", COVERED, ids=lambda row: row[0][:60])
def test_row_names_existing_tests_or_a_reason(row: list[str]) -> None:
    original_cell, rlkit_cell, coverage = row
    tests = TEST.findall(coverage)
    for path, name in tests:
        assert (ROOT / path).is_file(), f"{original_cell}: there is no {path}"
        assert name in functions_in(path), f"{original_cell}: {path} has no {name}"
    if coverage.startswith(("untested: ", "no counterpart: ")):
        assert not tests
        assert len(coverage.partition(": ")[2].split()) > 3, f"{original_cell}: it must say why"
        return
    playing = [path for path, _ in tests if not path.startswith(PARSING)]
    assert playing, f"{original_cell} -> {rlkit_cell}: no test plays it; what only parses does not count"
    if "an account" in coverage:
        assert re.match(r"needs an account: [\w&., ]+; with a mock: `tests/", coverage), coverage


@pytest.mark.parametrize("name", SECTIONS)
def test_every_documented_command_and_option_has_a_row(name: str) -> None:
    file, begin, end = SECTIONS[name]
    text = (ROOT / "docs" / file).read_text()
    assert begin in text
    assert end in text
    other = read_rows(text[text.index(begin) : text.index(end)])
    if name.startswith("OpenReward"):
        other += read_rows(text[text.index(end) :].partition("## Value by value")[0])
        fields = (ROOT / "docs" / "openreward.md").read_text().partition("## From OpenReward's cookbook")[2]
        other += read_rows(fields)
    covered = read_rows(read_section(name))
    spans = {span for row in covered for span in SPAN.findall(row[0])}
    texts = {row[0] for row in covered}
    missing = [
        row[0] for row in other if (set(SPAN.findall(row[0])) - spans if SPAN.search(row[0]) else row[0] not in texts)
    ]
    assert missing == []


def test_the_page_is_in_the_navigation() -> None:
    assert f"migrating/{PAGE.name}" in (ROOT / "mkdocs.yml").read_text()


def test_no_documented_command_is_abbreviated() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for words in fenced_commands(page):
            assert not [word for word in words if word in ("…", "...")], (page, words)
