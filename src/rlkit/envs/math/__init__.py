"""Maths problems with checkable answers."""

from rlkit.envs.math.problems import Problem
from rlkit.envs.math.prompts import Example, Template
from rlkit.envs.math.task import MathProblem, Scoring
from rlkit.envs.math.tasks import maths

__all__ = ["Example", "MathProblem", "Problem", "Scoring", "Template", "maths"]
