r"""Grader of answers: rlkit's own comparison first, then math-verify if rlkit cannot decide.

Invariant: grading ends for any answer and never blocks the event loop for longer than a few milliseconds. A gold answer
that cannot be graded raises an error instead of giving a reward of 0.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary

from rlkit.envs.math import math_verify_pool
from rlkit.envs.math.answers.comparison import DEFAULT_POLICIES, Policies, Verdict, judge, validate
from rlkit.envs.math.extraction import final_answer
from rlkit.errors import EnvironmentFault

__all__ = ["GoldError", "Grade", "Grader", "Policies", "Verdict", "compare", "final_answer", "validate"]

type GradingMethod = Literal["exact", "numeric", "math-verify", "monstrous", "timeout", "unparsed"]

_UNBOUNDED_COMMANDS = (r"\sum", r"\prod", r"\int", r"\lim", r"\iint", r"\oint")
"""Commands that math-verify may never finish to evaluate."""

_ELLIPSES = (r"\dots", r"\ldots", r"\cdots", "...", "…")
"""Ellipses; math-verify ignores them, as if the answer ended there."""


class GoldError(EnvironmentFault):
    """Gold answer that cannot be graded. It fails the episode, because the model is not at fault."""


@dataclass(frozen=True)
class Grade:
    """Verdict on an answer.

    Args:
        method: `exact` for equal text, words or rational numbers, `numeric` for values compared as floats or at points,
            `math-verify` for its verdict; `monstrous` for an answer over a limit, `timeout` for one that math-verify
            did not finish, `unparsed` for one that cannot be parsed. The last three are wrong answers.
    """

    correct: bool
    method: GradingMethod


def compare(answer: str, gold: str, *, policies: Policies = DEFAULT_POLICIES) -> Verdict:
    """Compare an answer with the gold one in this process: `yes`, `no`, or `unknown`. It never raises."""
    return judge(answer, gold, policies).verdict


_turns = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()
"""Lock for one comparison in a pass of an event loop: thousands in a pass would block it for seconds."""


class Grader:
    """Grader of answers: any number at once, from any event loop.

    Args:
        limit_s: seconds that math-verify may take for one answer.
        processes: number of processes that run math-verify, shared by all graders with the same settings and started
            when an answer needs them.
    """

    def __init__(self, *, policies: Policies = DEFAULT_POLICIES, limit_s: float = 5.0, processes: int = 2) -> None:
        self.policies = policies
        self.limit_s = limit_s
        self.processes = processes
        self._counts: Counter[GradingMethod] = Counter()
        math_verify_pool.is_installed()  # cached here: it searches the file system, which would block an event loop

    def __reduce__(self) -> tuple[partial[Grader], tuple[()]]:
        return partial(Grader, policies=self.policies, limit_s=self.limit_s, processes=self.processes), ()

    @property
    def counts(self) -> Mapping[GradingMethod, int]:
        """Numbers of graded answers by `Grade.method`."""
        return dict(self._counts)

    async def grade(self, answer: str, gold: str) -> Grade:
        """Compare an answer with the gold one; GoldError if the gold answer cannot be graded."""
        async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            await asyncio.sleep(0)
            judgement = judge(answer, gold, self.policies)
        if judgement.verdict == "unknown":
            grade = await self._ask_math_verify(answer, gold, is_gold_readable=judgement.gold_read)
        else:
            grade = Grade(judgement.verdict == "yes", judgement.method)
        self._counts[grade.method] += 1
        return grade

    async def _ask_math_verify(self, answer: str, gold: str, *, is_gold_readable: bool) -> Grade:
        """Grade by math-verify if it is installed; answers that it may never finish are `unparsed`."""
        grade = Grade(False, "unparsed")
        if not math_verify_pool.is_installed():
            reason = "cannot be parsed by rlkit; install math-verify, which may parse it"
        elif any(mark in answer and mark not in gold for mark in (*_UNBOUNDED_COMMANDS, *_ELLIPSES)):
            return grade
        else:
            future = math_verify_pool.ask(answer, gold, processes=self.processes, limit_s=self.limit_s)
            reply = await asyncio.wrap_future(future)
            if reply in ("yes", "no"):
                return Grade(reply == "yes", "math-verify")
            reason = "cannot be parsed, neither by rlkit nor by math-verify"
            if reply == "timeout":
                grade, reason = Grade(False, "timeout"), f"cannot be graded within {self.limit_s:g} s"
        if not is_gold_readable:
            raise GoldError(f"the gold answer {gold[:80]!r} {reason}")
        return grade
