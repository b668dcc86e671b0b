from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.errors import UsageError
from rlkit.sandbox.context import Entry, hash_entries, list_entries
from rlkit.sandbox.dockerfile import Copy, read


def copied(context: Path, line: str) -> list[Entry]:
    (context / "Dockerfile").write_text(f"FROM image\nWORKDIR /app\n{line}\n")
    step = read(context / "Dockerfile").steps[-1]
    assert isinstance(step, Copy)
    return list_entries(step, context)


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/deep/d.log", "sub/.hidden"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (tmp_path / "outside").write_text("secret")
    (root / "leads-out").symlink_to(tmp_path / "outside")
    (root / "leads-in").symlink_to("a.txt")
    return root


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("COPY a.txt /x", ["x"]),
        ("COPY a.txt /x/", ["x/a.txt"]),
        ("COPY a.txt b.txt here", ["app/here/a.txt", "app/here/b.txt"]),
        ("COPY *.txt .", ["app/a.txt", "app/b.txt"]),
        ("COPY sub /s", ["s", "s/.hidden", "s/c.txt", "s/deep", "s/deep/d.log"]),
        ("COPY ./sub/deep/ /", ["d.log"]),
        ("COPY leads-in /x", ["x"]),
    ],
)
def test_copy_instructions_select_sources_and_targets(context: Path, line: str, names: list[str]) -> None:
    assert sorted(entry.name for entry in copied(context, line) if entry.name) == names


@pytest.mark.parametrize("line", ["COPY ../outside /x", "COPY leads-out /x", "COPY nothing.txt /x", "COPY *.md /x"])
def test_nothing_outside_the_context_is_copied(context: Path, line: str) -> None:
    with pytest.raises(UsageError, match="Dockerfile:3: "):
        copied(context, line)


def test_dockerignore_excludes_files_and_the_last_rule_decides(context: Path) -> None:
    (context / ".dockerignore").write_text("# comment\n**/*.log\nsub/.hid*\n*.txt\n!b.txt\nDockerfile\nleads-*\n")
    names = sorted(entry.name for entry in copied(context, "COPY . /"))
    assert names == [".dockerignore", "b.txt", "sub", "sub/c.txt", "sub/deep"]
    with pytest.raises(UsageError, match="excludes it"):
        copied(context, "COPY a.txt /x")


def test_the_digest_changes_with_names_modes_and_contents(context: Path) -> None:
    digests = {hash_entries(copied(context, "COPY a.txt /x"))}
    digests.add(hash_entries(copied(context, "COPY a.txt /y")))
    (context / "a.txt").chmod(0o755)
    digests.add(hash_entries(copied(context, "COPY a.txt /x")))
    (context / "a.txt").write_text("other")
    digests.add(hash_entries(copied(context, "COPY a.txt /x")))
    assert len(digests) == 4
    assert hash_entries(copied(context, "COPY a.txt /x")) in digests
