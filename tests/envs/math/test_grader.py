from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import NamedTuple

import pytest

from rlkit.envs.math import math_verify_pool
from rlkit.envs.math.grader import GoldError, Grade, Grader, Policies, compare, validate

DATA = Path(__file__).parents[2] / "data" / "math"


class Case(NamedTuple):
    gold: str
    answer: str
    equivalent: bool
    kind: str


CASES = [Case(**json.loads(line)) for line in (DATA / "grader_cases.jsonl").read_text().splitlines()]
MATH500: list[str] = json.loads((DATA / "math500_golds.json").read_text())
GSM8K: list[str] = json.loads((DATA / "gsm8k_golds.json").read_text())

EQUAL_GOLDS = [
    {r"\frac14", r"\frac{1}{4}"},
    {r"2\sqrt{5}", r"2 \sqrt{5}"},
    {"1,-2", "-2,1"},
    {r"180^\circ", r"\pi"},
]
"""All there are among the MATH-500 golds that are no integers."""


@pytest.fixture
def without_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_verify_pool, "is_installed", lambda: False)


def test_the_labelled_answers_are_graded_as_their_labels_say() -> None:
    wrong = [case for case in CASES if (compare(case.answer, case.gold) == "yes") != case.equivalent]
    assert len(wrong) <= 0.01 * len(CASES)
    assert not [case for case in wrong if not case.equivalent]


def test_few_labelled_answers_need_math_verify() -> None:
    unknown = sum(compare(case.answer, case.gold) == "unknown" for case in CASES)
    assert unknown <= 0.02 * len(CASES)


def test_every_gold_answer_of_gsm8k_and_math500_can_be_graded() -> None:
    assert [gold for gold in GSM8K + MATH500 if not validate(gold)] == []


def test_no_two_gold_answers_of_math500_are_confused() -> None:
    golds = [gold for gold in MATH500 if not gold.removeprefix("-").isdecimal()]
    equal = [{gold, other} for at, gold in enumerate(golds) for other in golds[:at] if compare(other, gold) != "no"]
    assert sorted(map(sorted, equal)) == sorted(map(sorted, EQUAL_GOLDS))


def test_a_worked_solution_is_rejected_as_gold_answer() -> None:
    assert not validate(r"We add $2$ and $3$ to get $2+3=5$. Therefore, the answer is $\boxed{5}$.")
    assert not validate(r"\frac{1}{0}")
    assert not validate("")
    assert not validate("x" * 10_000)


def test_a_grade_names_its_basis() -> None:
    async def grades() -> list[Grade]:
        grader = Grader()
        return [
            await grader.grade(*pair) for pair in (("1/2", "0.5"), ("2^{n-1}", "2^n/2"), ("9**9**9", "1"), ("{", "1"))
        ]

    assert [(grade.correct, grade.method) for grade in asyncio.run(grades())] == [
        (True, "exact"),
        (True, "numeric"),
        (False, "monstrous"),
        (False, "unparsed"),
    ]


def test_grading_policies_are_applied() -> None:
    assert compare("17+25", "42") == "yes"
    assert asyncio.run(Grader(policies=Policies(unevaluated="reject")).grade("17+25", "42")).correct is False


@pytest.mark.usefixtures("without_math_verify")
def test_without_math_verify_undecided_answers_are_wrong_and_counted() -> None:
    grader = Grader()
    assert asyncio.run(grader.grade(r"\sum_{i=1}^3 i", "6")) == Grade(False, "unparsed")
    assert asyncio.run(grader.grade("6", "6")).correct
    assert grader.counts == {"unparsed": 1, "exact": 1}


@pytest.mark.usefixtures("without_math_verify")
def test_an_unreadable_gold_answer_is_an_error() -> None:
    for gold in (r"\undefinedmacro{1}", "", "(" * 5000):
        with pytest.raises(GoldError, match="gold"):
            asyncio.run(Grader().grade("6", gold))


def test_thousands_of_gradings_do_not_block_the_event_loop() -> None:
    async def turns() -> int:
        count = 0

        async def watch() -> None:
            nonlocal count
            while True:
                await asyncio.sleep(0)
                count += 1

        watcher = asyncio.create_task(watch())
        grader = Grader()
        await asyncio.gather(*(grader.grade(str(number), "7") for number in range(300)))
        watcher.cancel()
        return count

    assert asyncio.run(turns()) >= 300


def test_a_cancelled_grading_does_not_block_others() -> None:
    async def grades() -> list[Grade | BaseException]:
        grader = Grader()
        tasks = [asyncio.create_task(grader.grade(str(number), "1")) for number in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = asyncio.run(grades())
    assert isinstance(second, asyncio.CancelledError)
    assert isinstance(first, Grade) and isinstance(third, Grade)


def test_a_grader_serves_one_event_loop_after_the_other() -> None:
    grader = Grader()
    assert [asyncio.run(grader.grade("1", "1")).correct for _ in range(2)] == [True, True]


def test_a_grader_can_be_pickled() -> None:
    grader = Grader(policies=Policies(percent="strict"), limit_s=1.5, processes=3)
    copy = pickle.loads(pickle.dumps(grader))
    assert (copy.policies, copy.limit_s, copy.processes) == (grader.policies, 1.5, 3)
    assert asyncio.run(copy.grade("1", "1")).correct
