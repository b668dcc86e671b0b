"""One expansion of the archive as a task: a model writes a program, and its construction is verified.

Invariant: the reward is the problem's reward of the construction that the program returned, once, or 0 where there is
no valid one. What runs programs may fail; that fails the episode, and is no reward.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from rlkit._util.activity import current_activity
from rlkit._util.stopwatch import request_wait
from rlkit._util.threads import in_thread
from rlkit.env import Env
from rlkit.envs.discovery import prompts, records
from rlkit.envs.discovery.problem import Invalid, Problem, Verified
from rlkit.envs.discovery.prompts import ENTRY, POLISH, Terms
from rlkit.envs.discovery.runners import RunnerChoice, shared_runner
from rlkit.envs.discovery.state import State
from rlkit.policy import Policy, Reply
from rlkit.sandbox.runners.programs import Program, ProgramLimits, ProgramResult
from rlkit.types import Json, Message, Outcome

CHILD = "child"
"""Under this an episode's info holds the state that it found."""

SAVED = "saved"
"""Under this it holds the records of its task that were saved by rollouts of which a killed process kept no more."""

type End = Literal["valid", "invalid", "no_code", "compile", "error", "timeout", "memory", "killed", "too large"]

_POLISHER = f"def {ENTRY}(seconds):\n    return {POLISH}(start, seconds)\n"
_SHOWN_CHARS = 2000
_SPARE = 1.5  # a local search looks at the clock between its steps only


@dataclass(frozen=True, slots=True)
class Play:
    """How tasks of a search are played.

    Args:
        polish_s: seconds of local search that each child gets before it is archived; 0 for none.
        options: of the problem, for its records.
    """

    terms: Terms = field(default_factory=lambda: Terms(ProgramLimits()))
    runner: RunnerChoice = field(default_factory=RunnerChoice)
    polish_s: float = 0.0
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])


class _Queue:
    """A program that was asked for: what its end takes beyond its own time limit, it waited for others.

    That is not counted against the rollout, whose hundreds of neighbours may share two processors.
    """

    def __init__(self, timeout_s: float) -> None:
        self._clock = asyncio.get_running_loop().time
        self._own_until_s = self._clock() + timeout_s
        self.silent_s = 0.0

    @property
    def excused_s(self) -> float:
        return max(0.0, self._clock() - self._own_until_s)


@dataclass(frozen=True)
class ConstructionProblem(Env):
    """A problem, and the state that a program is to improve on.

    Its metrics are `valid`, `improved` over the parent, the `value` of a valid construction, the `program_s` and
    `program_cpu_s` that it took, with `polish_s` the `polished_value` and the `polish_cpu_s` that this took, and the
    shares `end/<how>` of how programs ended. Its info holds the program, what it printed, and what it found.

    Args:
        folder: where records go; None keeps none.
        best: value that the search knew when this was drawn; what is no better than that is no record.
        saved: records of this task that were there when its run was resumed.
    """

    problem: Problem
    parent: State
    number: int = 0
    play: Play = field(default_factory=Play)
    folder: Path | None = None
    best: float | None = None
    saved: tuple[State, ...] = ()

    @property
    def task_id(self) -> str:
        """The problem, the expansion and the state."""
        return f"{self.problem.name}/{self.number:05d}-{self.parent.id}"

    def prompt(self) -> list[Message]:
        """The conversation that the model is given."""
        return prompts.messages(self.problem, self.parent, self.play.terms)

    async def rollout(self, policy: Policy) -> Outcome:
        """Ask once, run once, verify."""
        outcome = await self.judged(await policy.chat(self.prompt()))
        if not self.saved:
            return outcome
        return replace(outcome, info={**outcome.info, SAVED: [state.to_json() for state in self.saved]})

    async def judged(self, reply: Reply) -> Outcome:
        """The outcome of a reply.

        Raises:
            EnvironmentFault: what runs programs failed.
            MissingError: it cannot run them as safely as was asked for.
        """
        code = prompts.final_code(reply.text)
        if code is None:
            return _outcome(0.0, "no_code", {"why": "the final answer has no ```python block"}, reply)
        ran = await self._run(self._program(code), self.play.terms.limits, "programs running or queued")
        found, why = await in_thread(self._verified, ran)
        metrics = {"program_s": ran.seconds, "program_cpu_s": ran.cpu_s}
        info: dict[str, Json] = {"program": code, "stdout": ran.stdout}
        if found is None:
            end = _end(ran)
            return _outcome(0.0, end, {**info, "why": why[-_SHOWN_CHARS:]}, reply, metrics)
        child = State(found.construction, found.value, self.parent.id, self.parent.value, code, ran.stdout)
        metrics["value"] = found.value
        metrics["improved"] = float(self.problem.better(found.value, self.parent.value))
        reward = self.problem.reward(found.value)
        if self.play.polish_s and self.problem.polish is not None:
            child, metrics["polish_cpu_s"] = await self._polished(child, self.problem.polish)
            metrics["polished_value"] = child.value
        if self.folder is not None:
            metrics["record"] = float(await in_thread(self._recorded, self.folder, child))
        return _outcome(reward, "valid", {**info, CHILD: child.to_json(), "value": found.value}, reply, metrics)

    def _program(self, code: str) -> Program:
        terms, polish = self.play.terms, self.problem.polish
        arguments = {"seed": self.number, "budget_s": terms.budget_s}
        helpers = {POLISH: polish} if terms.helpers and polish is not None else {}
        return Program(code, ENTRY, arguments, {self.problem.initial: self.parent.construction}, helpers)

    async def _run(self, program: Program, limits: ProgramLimits, activity: str) -> ProgramResult:
        with request_wait(_Queue(limits.timeout_s)), current_activity().track(activity):
            return await shared_runner(self.play.runner).run(program, limits)

    def _verified(self, ran: ProgramResult) -> tuple[Verified | None, str]:
        """What a program returned, as it counts; or why it does not."""
        if ran.value is None:
            return None, ran.error
        try:
            found = self.problem.verified(ran.value)
        except Invalid as error:
            return None, str(error)
        if not math.isfinite(found.value):
            return None, f"its value is {found.value}, which is no number"
        return found, ""

    def _recorded(self, folder: Path, child: State) -> bool:
        """Save the child where it is a record; whether it is."""
        if self.best is not None and not self.problem.better(child.value, self.best):
            return False
        return records.offer(folder, child, self.problem, options=self.play.options, task=self.task_id)

    async def _polished(self, child: State, polish: str) -> tuple[State, float]:
        """The child after a local search, which runs where programs do, and the processor seconds that it took.

        The child itself where nothing better was found.
        """
        seconds = self.play.polish_s
        limits = replace(self.play.terms.limits, timeout_s=_SPARE * seconds + self.play.terms.limits.timeout_s)
        program = Program(_POLISHER, ENTRY, {"seconds": seconds}, {"start": child.construction}, {POLISH: polish})
        ran = await self._run(program, limits, "local searches running or queued")
        found, _ = await in_thread(self._verified, ran)
        if found is None or not self.problem.better(found.value, child.value):
            return child, ran.cpu_s
        return replace(child, construction=found.construction, value=found.value, polished=True), ran.cpu_s


def _end(ran: ProgramResult) -> End:
    if ran.outcome == "value":
        return "invalid"
    if ran.outcome == "error" and ran.error.rpartition("\n")[2].startswith(("SyntaxError", "IndentationError")):
        return "compile"
    return ran.outcome


def _outcome(
    reward: float, end: End, info: Mapping[str, Json], reply: Reply, metrics: Mapping[str, float] | None = None
) -> Outcome:
    ends = {f"end/{name.replace(' ', '_')}": float(name == end) for name in get_args(End.__value__)}
    counted = {"valid": float(end == "valid"), "improved": 0.0, **ends, **(metrics or {})}
    return Outcome(reward, counted, {"end": end, **info}, truncated=reply.truncated)
