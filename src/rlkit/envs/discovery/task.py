"""Task of a search: a model writes a program, whose construction is verified.

Invariant: the reward is the problem's reward for the construction that the program returned; it is 0 without a valid
construction. If the program runner fails, the episode fails and has no reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from rlkit._util.activity import current_activity
from rlkit._util.stopwatch import OwnWait, request_wait
from rlkit._util.threads import in_thread
from rlkit.env import Env
from rlkit.envs.discovery import prompts, records
from rlkit.envs.discovery.problem import InvalidConstruction, Problem, VerifiedConstruction
from rlkit.envs.discovery.prompts import ENTRY, POLISH
from rlkit.envs.discovery.settings import PlaySettings
from rlkit.envs.discovery.state import State
from rlkit.policy import Policy
from rlkit.sandbox.runners.programs import Program, ProgramLimits, ProgramResult
from rlkit.types import Json, Message, Outcome, Reply

CHILD = "child"
"""Key of the new state in an episode's info."""

SAVED = "saved"
"""Key of saved records of the task whose episodes a killed process lost."""

type End = Literal["valid", "invalid", "no_code", "compile", "error", "timeout", "memory", "killed", "too large"]

_POLISH_PROGRAM = f"def {ENTRY}(seconds):\n    return {POLISH}(start, seconds)\n"
MAX_ERROR_CHARS = 2000
_POLISH_TIME_FACTOR = 1.5  # a local search checks the clock only between steps


@dataclass(frozen=True)
class ConstructionProblem(Env):
    """Problem with the state that a program should improve.

    Metrics of an episode: `valid`, `improved` (over the parent), `value` of a valid construction, `program_s`,
    `program_cpu_s`, `end/<kind>` for each way in which a program can end, and with `polish_s` `polished_value` and
    `polish_cpu_s`. The info has the program, its output and its construction.

    Args:
        folder: folder of records; None for no records.
        best: best value of the search when this task was drawn; a new record must be better.
        saved: records of this task that existed when its run was resumed.
        lineage: ids and values of the parent and of its ancestors.
    """

    problem: Problem
    parent: State
    number: int = 0
    play: PlaySettings = field(default_factory=PlaySettings)
    folder: Path | None = None
    best: float | None = None
    saved: tuple[State, ...] = ()
    lineage: tuple[tuple[str, float], ...] = ()

    @property
    def task_id(self) -> str:
        """Name of the problem, number of the task, and id of the parent."""
        return f"{self.problem.name}/{self.number:05d}-{self.parent.id}"

    def prompt(self) -> list[Message]:
        """Return the conversation that asks for a program."""
        return prompts.make_messages(self.problem, self.parent, self.play)

    async def rollout(self, policy: Policy) -> Outcome:
        """Ask for a program, run it and verify its construction."""
        outcome = await self.grade(await policy.chat(self.prompt()))
        if not self.saved:
            return outcome
        return replace(outcome, info={**outcome.info, SAVED: [state.to_json() for state in self.saved]})

    async def grade(self, reply: Reply) -> Outcome:
        """Return the outcome of a reply.

        Raises:
            EnvironmentFault: the program runner failed.
            MissingError: the runner cannot provide the configured isolation.
        """
        code = prompts.extract_code(reply.text)
        if code is None:
            return _make_outcome(0.0, "no_code", {"why": "the final answer has no ```python block"}, reply)
        play, polish = self.play, self.problem.polish
        arguments = {"seed": self.number, "budget_s": play.budget_s}
        helpers = {POLISH: polish} if play.helpers and polish is not None else {}
        program = Program(code, ENTRY, arguments, {self.problem.initial: self.parent.construction}, helpers)
        result = await self._run(program, play.limits, "programs running or queued")
        metrics = {"program_s": result.seconds, "program_cpu_s": result.cpu_s}
        info: dict[str, Json] = {"program": code, "stdout": result.stdout}
        try:
            verified = await in_thread(self._verify, result)
        except InvalidConstruction as error:
            info["why"] = str(error)[-MAX_ERROR_CHARS:]
            return _make_outcome(0.0, _classify_end(result), info, reply, metrics)
        child = State(verified.construction, verified.value, self.parent.id, self.parent.value, code, result.stdout)
        metrics["value"] = verified.value
        metrics["improved"] = float(self.problem.is_better(verified.value, self.parent.value))
        reward = self.problem.reward(verified.value)
        if play.polish_s and polish is not None:
            child, metrics["polish_cpu_s"] = await self._polish(child, polish)
            metrics["polished_value"] = child.value
        if self.folder is not None:
            is_best = self.best is None or self.problem.is_better(child.value, self.best)
            save = partial(records.save_if_better, task=self.task_id, lineage=self.lineage)
            metrics["record"] = float(is_best and await in_thread(save, self.folder, child, self.problem))
        return _make_outcome(reward, "valid", {**info, CHILD: child.to_json(), "value": verified.value}, reply, metrics)

    async def _run(self, program: Program, limits: ProgramLimits, activity: str) -> ProgramResult:
        # Time beyond the program's limit is queueing, because hundreds of rollouts may share two processors.
        with request_wait(OwnWait(counted_s=limits.timeout_s)), current_activity().track(activity):
            return await self.play.runner.run(program, limits)

    def _verify(self, result: ProgramResult) -> VerifiedConstruction:
        if result.value is None:
            raise InvalidConstruction(result.error)
        return self.problem.verify(result.value)

    async def _polish(self, child: State, polish: str) -> tuple[State, float]:
        """Return the child, improved by local search if possible, and the processor seconds of the search."""
        seconds, limits = self.play.polish_s, self.play.limits
        limits = replace(limits, timeout_s=_POLISH_TIME_FACTOR * seconds + limits.timeout_s)
        program = Program(_POLISH_PROGRAM, ENTRY, {"seconds": seconds}, {"start": child.construction}, {POLISH: polish})
        result = await self._run(program, limits, "local searches running or queued")
        with suppress(InvalidConstruction):
            verified = await in_thread(self._verify, result)
            if self.problem.is_better(verified.value, child.value):
                child = replace(child, construction=verified.construction, value=verified.value, polished=True)
        return child, result.cpu_s


def _classify_end(result: ProgramResult) -> End:
    if result.outcome == "value":
        return "invalid"
    if result.outcome == "error" and result.error.rpartition("\n")[2].startswith(("SyntaxError", "IndentationError")):
        return "compile"
    return result.outcome


def _make_outcome(
    reward: float, end: End, info: Mapping[str, Json], reply: Reply, metrics: Mapping[str, float] | None = None
) -> Outcome:
    ends = {f"end/{name.replace(' ', '_')}": float(name == end) for name in get_args(End.__value__)}
    all_metrics = {"valid": float(end == "valid"), "improved": 0.0, **ends, **(metrics or {})}
    return Outcome(reward, all_metrics, {"end": end, **info}, truncated=reply.truncated)
