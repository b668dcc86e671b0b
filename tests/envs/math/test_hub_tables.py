"""Tables come from the hub once, and then from the disk; files of every format give the same rows."""

from __future__ import annotations

import csv
import json
import math
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from rlkit.envs.math import maths
from rlkit.envs.math.catalogue import DATASETS, Columns, Table
from rlkit.envs.math.hub_tables import table_rows
from rlkit.envs.math.problems import read_problems
from rlkit.envs.math.table_files import read_rows
from rlkit.errors import MissingError, UsageError
from tests.envs.math.fake_hub import LoadRequest, fake_hub, load, one_table

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "unused": "x"} for n in range(5)]
COLUMNS = Columns("question", "answer")


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Something that takes connections; a folder in the hub's own form stands for what is behind it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.delenv("HTTP_PROXY", raising=False)


@pytest.mark.usefixtures("reachable")
def test_a_table_is_fetched_once_with_its_columns_and_then_needs_no_hub(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "train-00000.parquet")
    table = Table(str(folder), "0" * 40, "train", COLUMNS, rows_max=4)
    notes = list[str]()
    expected = [{"question": row["question"], "answer": row["answer"]} for row in ROWS[:4]]
    assert list(table_rows(table, note=notes.append)) == expected
    unreachable(monkeypatch)
    assert list(table_rows(table, note=notes.append)) == expected
    assert len(notes) == 1
    assert [path.suffix for path in sorted((cache / "datasets").iterdir()) if path.suffix != ".lock"] == [".jsonl"]


@pytest.mark.usefixtures("reachable")
def test_a_failed_fetch_is_a_one_line_error_and_leaves_no_files(tmp_path: Path, cache: Path) -> None:
    table = Table(str(tmp_path / "nothing-here"), "0" * 40, "train", COLUMNS)
    with pytest.raises(MissingError, match="cannot be downloaded from the hub") as caught:
        table_rows(table, note=lambda message: None)
    assert "\n" not in str(caught.value)
    assert not [path for path in (cache / "datasets").iterdir() if path.suffix != ".lock"]


def test_an_unreachable_hub_error_explains_how_to_use_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable(monkeypatch)
    with pytest.raises(MissingError, match=r"owner/name is not on this machine, and 127\.0\.0\.1 .* set path to the"):
        table_rows(Table("owner/name", "0" * 40, "train", COLUMNS), note=lambda message: None)


OLMO, POLARIS = "allenai/Dolci-RL-Zero-Math-7B", "POLARIS-Project/Polaris-Dataset-53K"
OLD, NEW = "a" * 40, "b" * 40


@pytest.mark.slow
def test_a_dataset_without_a_pinned_commit_is_read_at_the_runs_first_commit(tmp_path: Path) -> None:
    olmo, here, there = {"dataset": "olmo3_rlzero_7b"}, tmp_path / "here", tmp_path / "there"
    files = {
        commit: one_table([{"prompt": "What is it?", "ground_truth": answer}])
        for commit, answer in ((OLD, "1"), (NEW, "2"))
    }
    with fake_hub({OLMO: {OLD: files[OLD]}}) as hub:
        (first,) = load(hub, LoadRequest(here, olmo))
        hub.repositories = {OLMO: files}
        later = load(
            hub,
            LoadRequest(here, olmo),
            LoadRequest(there, olmo, recorded_commits={OLMO: OLD}),
            LoadRequest(there, olmo),
            LoadRequest(there, olmo | {"revision": OLD}),
        )
    # A machine goes on with what it has; another takes the newest, unless the run began with another.
    commits = [(loaded.answers, loaded.recorded) for loaded in (first, *later)]
    assert commits[:2] == [(["1"], {OLMO: OLD})] * 2
    assert commits[2:] == [(["1"], {OLMO: NEW}), (["2"], {OLMO: NEW}), (["1"], None)]


@pytest.mark.slow
def test_a_pinned_commit_is_read_and_a_missing_one_is_named(tmp_path: Path) -> None:
    known_commit = DATASETS["polaris"].splits["train"][0].revision
    assert known_commit is not None
    row = {"problem": "What is it?", "difficulty": "3/8"}
    files = {commit: one_table([row | {"answer": answer}]) for commit, answer in ((known_commit, "1"), (NEW, "2"))}
    with fake_hub({POLARIS: files}) as hub:
        polaris, minerva = load(
            hub, LoadRequest(tmp_path, {"dataset": "polaris"}), LoadRequest(tmp_path, {"dataset": "minerva"})
        )
    assert polaris.answers == ["1"]
    assert set(hub.read) == {known_commit}
    assert (minerva.error or "").startswith(
        "MissingError: math-ai/minervamath cannot be downloaded from the hub: RepositoryNotFoundError"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "minerva", "revision": "main"}, "revision: 'main' is not a commit of 40 hexadecimal digits"),
        ({"path": Path("x.jsonl"), "revision": OLD}, "revision: has no effect on a file"),
        ({"dataset": "aime", "revision": OLD}, "revision: aime has several repositories: HuggingFaceH4/aime_2024, "),
    ],
)
def test_an_invalid_revision_is_rejected(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        maths(**arguments)  # pyright: ignore[reportArgumentType]  as YAML would give them


def test_files_of_every_format_give_the_same_problems(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    problems_by_format = [
        list(read_problems(read_rows(tmp_path / name), COLUMNS, where=name))
        for name in ("a.jsonl", "a.json", "a.parquet", "a.csv", "a.tsv")
    ]
    assert all(problems == problems_by_format[0] for problems in problems_by_format)
    assert [problem and problem.answer for problem in problems_by_format[0]] == ["0", "2", "4", "6", "8"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": ', "a.jsonl:2 is not valid JSON"),
        ("a.jsonl", b"[1]", "a.jsonl:1 is not a JSON object"),
        ("a.jsonl", b"\xff\xfe", "save it as UTF-8"),
        ("a.csv", "é".encode("latin-1"), "save it as UTF-8"),
        ("a.csv", b"a\n" + b"1" * 200_000, "cannot be read"),
        ("a.json", b'{"a": 1}', "must hold a list of objects"),
        ("a.json", b"[1]", "item 0"),
        ("a.json", b"[" * 100_000, "is not valid JSON"),
        ("a.parquet", b"PAR1", "is not a Parquet file"),
    ],
)
def test_an_unreadable_file_is_named_with_its_location(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        list(read_rows(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_columns_configure_conversations_lists_and_filters() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    rows = [
        {"prompt": messages, "truth": ["2", "two"], "kind": ["math", "easy"]},
        {"prompt": "What is it?", "truth": "x", "kind": ["code"]},
        {"prompt": "", "truth": "3", "kind": ["math"]},
    ]
    problems = list(read_problems(rows, Columns("prompt", "truth", only=("kind", "math")), where="rows"))
    assert [problem and (problem.question, problem.answer) for problem in problems] == [("What is 1 + 1?", "2"), None]


def test_null_markers_are_no_answer_and_bytes_are_text() -> None:
    rows = [{"question": "?", "answer": answer} for answer in (None, math.nan, math.inf, [], "", b"4", 2.0)]
    problems = read_problems(rows, Columns("question", "answer"), where="rows")
    assert [problem and problem.answer for problem in problems] == [*[None] * 5, "4", "2"]


@pytest.mark.parametrize(
    ("level", "number"),
    [("Level 3", 3), ("3/8", 0.375), ("4.5", 4.5), (7, 7), (-1.5, -1.5), ("Level ?", None), ("1/0", None)],
)
def test_a_level_with_a_number_becomes_the_number(level: object, number: float | None) -> None:
    row = {"question": "?", "answer": "1", "level": level}
    (problem,) = read_problems([row], Columns("question", "answer", level="level"), where="rows")
    assert problem is not None
    assert problem.difficulty == number
