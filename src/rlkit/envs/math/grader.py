r"""Is an answer right? First by rlkit's own comparison, and where that does not know, by math-verify.

Invariant: a grading ends, whatever the answer is, and never holds the event loop for longer than a few milliseconds; a
gold answer that cannot be graded is a fault, and not a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rlkit.envs.math import workers
from rlkit.envs.math.answers.comparison import Judgement, Verdict, equals_itself, judge
from rlkit.envs.math.answers.policies import DEFAULT, Policies
from rlkit.envs.math.extraction import final_answer
from rlkit.errors import EnvironmentFault

__all__ = ["GoldError", "Grade", "Grader", "Policies", "Verdict", "compare", "final_answer", "validate"]

type How = Literal["exact", "numeric", "math-verify", "monstrous", "timeout", "unparsed"]

SLICE_S = 0.004
"""The event loop gets its turn after so much comparing."""

_UNBOUNDED = (r"\sum", r"\prod", r"\int", r"\lim", r"\iint", r"\oint")
"""What math-verify may work on for ever."""

_GOING_ON = (r"\dots", r"\ldots", r"\cdots", "...", "…")
"""What math-verify leaves out, as if the answer ended there."""


class GoldError(EnvironmentFault):
    """A gold answer cannot be graded: the episode fails, for the model has done nothing wrong."""


@dataclass(frozen=True)
class Grade:
    """What a grader says.

    Args:
        correct: whether the answer is the gold one.
        how: what that rests on: `exact` for the same text, words or rational numbers, `numeric` for values compared as
            floats or at points, `math-verify` for its word; `monstrous` for an answer over a limit, `timeout` for one
            that math-verify did not get done with, `unparsed` for one that nobody can read. The last three are wrong.
    """

    correct: bool
    how: How


def compare(answer: str, gold: str, *, policies: Policies = DEFAULT) -> Verdict:
    """Whether an answer is the gold one: `yes`, `no`, or `unknown`; in this process, at once, without raising."""
    return judge(answer, gold, policies).verdict


def validate(gold: str) -> bool:
    """Whether a gold answer can be graded: it can be read, and equals itself."""
    return equals_itself(gold)


class _JudgeQueue:
    """Comparisons that wait for their turn on one event loop: thousands at once would hold it for seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting = deque[tuple[asyncio.Future[Judgement], partial[Judgement]]]()

    async def judge(self, answer: str, gold: str, policies: Policies) -> Judgement:
        if not self._waiting:
            self.loop.call_soon(self._judge_slice)
        future: asyncio.Future[Judgement] = self.loop.create_future()
        self._waiting.append((future, partial(judge, answer, gold, policies)))
        return await future

    def _judge_slice(self) -> None:
        end_s = time.perf_counter() + SLICE_S
        while self._waiting:
            future, compute = self._waiting.popleft()
            if not future.done():
                future.set_result(compute())
            if time.perf_counter() >= end_s:
                break
        if self._waiting:
            self.loop.call_soon(self._judge_slice)


class Grader:
    """Grades answers; any number at once, from any event loop.

    Args:
        policies: what counts as the same.
        limit_s: seconds that math-verify may take for one answer.
        processes: how many of them ask math-verify, shared by all graders with the same settings; none is started
            before an answer needs it.
    """

    def __init__(self, *, policies: Policies = DEFAULT, limit_s: float = 5.0, processes: int = 2) -> None:
        self.policies = policies
        self.limit_s = limit_s
        self.processes = processes
        self._counts: Counter[How] = Counter()
        self._queue: _JudgeQueue | None = None
        workers.installed()  # looks through the file system: not while an event loop waits

    def __reduce__(self) -> tuple[partial[Grader], tuple[()]]:
        return partial(Grader, policies=self.policies, limit_s=self.limit_s, processes=self.processes), ()

    @property
    def counts(self) -> Mapping[How, int]:
        """How many answers were graded, by `Grade.how`."""
        return dict(self._counts)

    async def grade(self, answer: str, gold: str) -> Grade:
        """Whether an answer is right.

        Raises:
            GoldError: the gold answer cannot be graded.
        """
        loop = asyncio.get_running_loop()
        if self._queue is None or self._queue.loop is not loop:
            self._queue = _JudgeQueue(loop)
        judgement = await self._queue.judge(answer, gold, self.policies)
        if judgement.verdict == "unknown":
            grade = await self._ask_math_verify(answer, gold)
        else:
            grade = Grade(judgement.verdict == "yes", judgement.how)
        self._counts[grade.how] += 1
        return grade

    async def _ask_math_verify(self, answer: str, gold: str) -> Grade:
        """Grade by math-verify, where it is installed; it is not shown an answer that it may work on for ever."""
        gold_read = judge(gold, gold, self.policies).gold_read
        grade = Grade(False, "unparsed")
        if not workers.installed():
            fault = "cannot be read; see whether math-verify can: install it"
        elif any(mark in answer and mark not in gold for mark in (*_UNBOUNDED, *_GOING_ON)):
            return grade
        else:
            said = await asyncio.wrap_future(workers.shared(self.processes, self.limit_s).ask(answer, gold))
            if said in ("yes", "no"):
                return Grade(said == "yes", "math-verify")
            fault = "cannot be read, nor by math-verify"
            if said == "timeout":
                grade, fault = Grade(False, "timeout"), f"cannot be graded within {self.limit_s:g} s"
        if not gold_read:
            raise GoldError(f"the gold answer {gold[:80]!r} {fault}")
        return grade
