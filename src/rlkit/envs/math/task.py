r"""Task of a maths problem with a checkable answer.

Invariant: the reward is a function of the reply alone. A grader that fails, or a gold answer that cannot be graded,
fails the episode and never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from rlkit.env import Env
from rlkit.envs.math.grader import Grader, Policies, final_answer
from rlkit.envs.math.problems import Problem, normalise_question
from rlkit.envs.math.prompts import Template
from rlkit.policy import Policy
from rlkit.types import Json, Message, Outcome, Reply

type RewardFunction = Callable[[str, str], float]
"""User's function from the reply's text and the gold answer to the reward."""

_share_grader = cache(Grader)
"""Grader of all tasks with the same policies: it counts grades, and tasks are immutable."""

MAX_RECORDED_CHARS = 1_000  # limit of a recorded answer: a model may put pages in a box


@dataclass(frozen=True)
class Scoring:
    """Rule for rewards."""

    format_weight: float = 0.0  # deducted from the reward of a truncated reply, or one without a boxed answer
    policies: Policies = field(default_factory=Policies)
    grader: RewardFunction | None = None  # computes the reward instead of the other two settings


@dataclass(frozen=True)
class MathProblem(Env):
    r"""Question with one right answer, which the model puts into `\\boxed{}`.

    The reward is 1 for the right answer and 0 for any other, less `scoring.format_weight` for bad form. The metrics are
    `correct` and `format`; the info has the answer, the grading method, and the labels `level` and `subject`.
    """

    problem: Problem
    source: str = "math"  # name of the dataset, used in task ids
    template: Template = field(default_factory=Template)
    scoring: Scoring = field(default_factory=Scoring)

    @property
    def task_id(self) -> str:
        """Dataset and row."""
        return f"{self.source}/{self.problem.place}"

    @property
    def gold(self) -> str:
        """A reply that earns the full reward."""
        return f"\\boxed{{{self.problem.answer}}}"

    @property
    def content(self) -> str:
        """Normalised question, equal for two tasks that ask the same."""
        return normalise_question(self.problem.question)

    def prompt(self) -> list[Message]:
        """Return the conversation that asks the question."""
        return self.template.messages(self.problem.question)

    async def rollout(self, policy: Policy) -> Outcome:
        """Ask the question and grade the reply."""
        return await self.grade(await policy.chat(self.prompt()))

    async def grade(self, reply: Reply) -> Outcome:
        """Return the outcome of a reply; EnvironmentFault if the gold answer cannot be graded, or the grader failed."""
        gold = self.problem.answer
        answer = final_answer(reply.text)
        formatted = not reply.truncated and final_answer(reply.text, boxed_only=True) is not None
        if self.scoring.grader is not None:
            reward = self.scoring.grader(reply.text, gold)
            metrics = {"format": float(formatted)}
            return Outcome(reward, metrics, self._info(answer, "own grader"), truncated=reply.truncated)
        method, is_correct = "no answer", False
        if answer is not None:
            grade = await _share_grader(policies=self.scoring.policies).grade(answer, gold)
            method, is_correct = grade.method, grade.correct
        reward = float(is_correct) - self.scoring.format_weight * (not formatted)
        metrics = {"correct": float(is_correct), "format": float(formatted)}
        # The gold answer stands for every right answer, so different notations share one vote.
        return Outcome(reward, metrics, self._info(gold if is_correct else answer, method), truncated=reply.truncated)

    def _info(self, answer: str | None, method: str) -> dict[str, Json]:
        labels = {"level": self.problem.level, "subject": self.problem.subject}
        return {
            "answer": None if answer is None else " ".join(answer.split())[:MAX_RECORDED_CHARS],
            "gold": self.problem.answer,
            "graded": method,
            "labels": {name: label for name, label in labels.items() if label is not None},
        }
