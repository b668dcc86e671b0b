from __future__ import annotations

import errno
import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlkit.errors import BudgetReached, UsageError
from rlkit.judges.records import JudgeRecords

NO_LIMITS = {"tokens": None, "usd": None}


def start(records: JudgeRecords, now_s: float, interval_s: float = 2.0, **limits: float) -> float:
    return records.start_request(NO_LIMITS | limits, interval_s=interval_s, now_s=now_s)


def test_requests_start_an_interval_apart(tmp_path: Path) -> None:
    records = JudgeRecords(tmp_path / "new" / "folder")
    assert [start(records, now_s) for now_s in (100.0, 100.0, 100.5, 109.0)] == [100.0, 102.0, 104.0, 109.0]
    assert start(JudgeRecords(records.folder), 109.0) == 111.0, "another process shares the limit"
    assert start(records, 109.0, interval_s=0.0) == 109.0


def test_a_clock_that_was_wrong_delays_no_request(tmp_path: Path) -> None:
    records = JudgeRecords(tmp_path)
    assert start(records, 1e9) == 1e9
    assert start(records, 100.0) == 100.0
    assert start(records, 100.0) == 102.0


def test_a_used_budget_starts_no_request(tmp_path: Path) -> None:
    records = JudgeRecords(tmp_path)
    records.add_spending(600, 0.25)
    assert start(records, 100.0, tokens=601, usd=0.26) == 100.0
    with pytest.raises(BudgetReached, match=f"budget_tokens: 600 of 600 tokens are used in {tmp_path}: raise the lim"):
        start(records, 1.0, tokens=600)
    with pytest.raises(UsageError, match=r"budget_usd: 0\.25 of 0\.2 usd are used"):
        start(records, 1.0, usd=0.2)


def add_often(folder: Path, times: int) -> None:
    records = JudgeRecords(folder)
    for number in range(times):
        records.add_spending(3, 0.5)
        records.write_verdict("aa", f"{number} " * 1000)


def test_no_spending_of_several_processes_is_lost(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("spawn").Process(target=add_often, args=(tmp_path, 30)) for _ in range(3)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        text = JudgeRecords(tmp_path).read_verdict("aa")
        assert len(set(text.split())) <= 1, "a reader sees a whole verdict"
    assert [process.exitcode for process in processes] == [0, 0, 0]
    with pytest.raises(UsageError, match="270 of 1 tokens"):
        start(JudgeRecords(tmp_path), 1.0, tokens=1)
    assert json.loads((tmp_path / "spending.json").read_text())["usd"] == 45.0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"text": 1', "\udcff"])
def test_a_damaged_verdict_is_none(tmp_path: Path, content: str) -> None:
    records = JudgeRecords(tmp_path)
    assert records.read_verdict("abcd") == ""
    records.write_verdict("abcd", "Score: 3")
    assert records.read_verdict("abcd") == "Score: 3"
    (path,) = tmp_path.glob("verdicts/ab/abcd.json")
    path.write_bytes(content.encode(errors="surrogateescape"))
    assert records.read_verdict("abcd") == ""


def test_a_damaged_record_of_spending_is_named(tmp_path: Path) -> None:
    (tmp_path / "spending.json").write_text("{")
    with pytest.raises(UsageError, match=r"spending\.json is damaged"):
        start(JudgeRecords(tmp_path), 1.0)


@pytest.mark.parametrize("value", ["many", None, [], True, -1, 10**309, float("nan")])
def test_spending_that_is_no_number_is_named(tmp_path: Path, value: object) -> None:
    (tmp_path / "spending.json").write_text(json.dumps({"tokens": value}))
    with pytest.raises(UsageError, match=r"spending\.json: tokens: .* is no number from 0 on"):
        start(JudgeRecords(tmp_path), 1.0)


@pytest.mark.parametrize(
    "write", [lambda records: records.add_spending(1, 0.0), lambda records: records.write_verdict("aa", "Score: 3")]
)
def test_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[JudgeRecords], None]
) -> None:
    def fill_disk(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rlkit.judges.records.files.write_text", fill_disk)
    with pytest.raises(UsageError, match=f"^judge: folder: {tmp_path} cannot be written: No space left on device$"):
        write(JudgeRecords(tmp_path))


def test_a_verdict_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "verdicts").write_text("")
    assert JudgeRecords(tmp_path).read_verdict("abcd") == ""
