r"""Is an answer right? First by rlkit's own comparison, and where that does not know, by math-verify.

Invariant: a grading ends, whatever the answer is, and never holds the event loop for longer than a few milliseconds; a
gold answer that cannot be graded is a fault, and not a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

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


class _Waiting(NamedTuple):
    answer: str
    gold: str
    policies: Policies
    future: asyncio.Future[Judgement]


@dataclass
class _Turns:
    """Comparisons that wait for their turn on one event loop: thousands at once would hold it for seconds."""

    loop: asyncio.AbstractEventLoop
    waiting: deque[_Waiting] = field(default_factory=deque[_Waiting])

    def add(self, waiting: _Waiting) -> None:
        if not self.waiting:
            self.loop.call_soon(self._slice)
        self.waiting.append(waiting)

    def _slice(self) -> None:
        end_s = time.perf_counter() + SLICE_S
        while self.waiting:
            answer, gold, policies, future = self.waiting.popleft()
            if not future.done():
                future.set_result(judge(answer, gold, policies))
            if time.perf_counter() >= end_s:
                break
        if self.waiting:
            self.loop.call_soon(self._slice)


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
        self._turns: _Turns | None = None
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
        grade = self._graded(await self._judged(answer, gold)) or await self._asked(answer, gold)
        self._counts[grade.how] += 1
        return grade

    async def _judged(self, answer: str, gold: str) -> Judgement:
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns.loop is not loop:
            self._turns = _Turns(loop)
        future: asyncio.Future[Judgement] = loop.create_future()
        self._turns.add(_Waiting(answer, gold, self.policies, future))
        return await future

    def _graded(self, judgement: Judgement) -> Grade | None:
        if judgement.verdict == "unknown":
            return None
        return Grade(judgement.verdict == "yes", judgement.how)

    async def _asked(self, answer: str, gold: str) -> Grade:
        """By math-verify, where it is installed; an answer that it may work on for ever is not shown to it."""
        readable = judge(gold, gold, self.policies).gold_read
        if not workers.installed():
            if not readable:
                raise GoldError(
                    f"the gold answer {gold[:80]!r} cannot be read; see whether math-verify can: install it"
                )
            return Grade(False, "unparsed")
        if any(mark in answer and mark not in gold for mark in (*_UNBOUNDED, *_GOING_ON)):
            return Grade(False, "unparsed")
        said = await asyncio.wrap_future(workers.shared(self.processes, self.limit_s).ask(answer, gold))
        if said == "timeout":
            if not readable:
                raise GoldError(f"the gold answer {gold[:80]!r} cannot be graded within {self.limit_s:g} s")
            return Grade(False, "timeout")
        if said == "gold unread":
            if not readable:
                raise GoldError(f"the gold answer {gold[:80]!r} cannot be read, nor by math-verify")
            return Grade(False, "unparsed")
        return Grade(said == "yes", "math-verify")
