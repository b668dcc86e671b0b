r"""A problem with an answer that can be checked, as a task.

Invariant: the reward is a function of the reply alone. A grader that fails, or a right answer that cannot be graded,
fails the episode and never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from rlkit.env import Env
from rlkit.envs.math.grader import Grader, Policies, final_answer
from rlkit.envs.math.problems import Problem, normalised
from rlkit.envs.math.prompts import Template
from rlkit.policy import Policy, Reply
from rlkit.types import Json, Message, Outcome

type OwnGrader = Callable[[str, str], float]
"""A user's own: the reply's text and the right answer in, the reward out."""

_LONGEST_SHOWN = 1_000
"""Characters of an answer that are recorded: a model may put pages in a box."""


@dataclass(frozen=True)
class Scoring:
    """What is paid for.

    Args:
        format_weight: what is taken off for a reply that has no boxed answer, or was cut off before its end.
        grader: instead of both, a function of the reply's text and the right answer.
    """

    format_weight: float = 0.0
    policies: Policies = field(default_factory=Policies)
    grader: OwnGrader | None = None


@dataclass(frozen=True)
class MathProblem(Env):
    r"""A question with one right answer, which the model is to put into `\\boxed{}`.

    The reward is 1 for the right answer and 0 for any other, less `scoring.format_weight` for bad form. Its metrics are
    `correct` and `format`; its info has the answer, how it was compared, and the labels `level` and `subject`.

    Args:
        source: the dataset, in the names of tasks.
    """

    problem: Problem
    source: str = "math"
    template: Template = field(default_factory=Template)
    scoring: Scoring = field(default_factory=Scoring)

    @property
    def task_id(self) -> str:
        """The dataset and the row."""
        return f"{self.source}/{self.problem.place}"

    @property
    def gold(self) -> str:
        """A reply that earns the full reward."""
        return f"\\boxed{{{self.problem.answer}}}"

    @property
    def content(self) -> str:
        """The question without its looks: two tasks that ask the same have the same."""
        return normalised(self.problem.question)

    def prompt(self) -> list[Message]:
        """The conversation that the model is given."""
        return self.template.messages(self.problem.question)

    async def rollout(self, policy: Policy) -> Outcome:
        """Ask once, grade once."""
        return await self.grade(await policy.chat(self.prompt()))

    async def grade(self, reply: Reply) -> Outcome:
        """The outcome of a reply.

        Raises:
            EnvironmentFault: the right answer cannot be graded, or the grader failed.
        """
        gold = self.problem.answer
        answer = final_answer(reply.text)
        formatted = not reply.truncated and final_answer(reply.text, boxed_only=True) is not None
        how, right = "no answer", False
        if self.scoring.grader is not None:
            reward = self.scoring.grader(reply.text, gold)
            metrics = {"format": float(formatted)}
            return Outcome(reward, metrics, self._info(answer, "own grader"), truncated=reply.truncated)
        if answer is not None:
            grade = await _grader(self.scoring.policies).grade(answer, gold)
            how, right = grade.how, grade.correct
        reward = float(right) - self.scoring.format_weight * (not formatted)
        metrics = {"correct": float(right), "format": float(formatted)}
        # Right answers in different notations are one answer, where votes are counted.
        return Outcome(reward, metrics, self._info(gold if right else answer, how), truncated=reply.truncated)

    def _info(self, answer: str | None, how: str) -> dict[str, Json]:
        labels = {"level": self.problem.level, "subject": self.problem.subject}
        return {
            "answer": None if answer is None else " ".join(answer.split())[:_LONGEST_SHOWN],
            "gold": self.problem.answer,
            "graded": how,
            "labels": {name: label for name, label in labels.items() if label is not None},
        }


@cache
def _grader(policies: Policies) -> Grader:
    """One for all tasks: it counts what it does, and a task must not change."""
    return Grader(policies=policies)
