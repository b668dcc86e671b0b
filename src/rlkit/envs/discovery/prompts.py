"""What a model is told, and what of its answer is a program.

Invariant: every number in a prompt is the one that holds: the parent's own length and value, the limits that are
enforced, the libraries that are installed.
"""

from __future__ import annotations

import importlib.metadata
import re
from contextlib import suppress
from dataclasses import dataclass

from rlkit.envs.discovery.problem import Problem
from rlkit.envs.discovery.state import State
from rlkit.sandbox.runners.programs import ProgramLimits
from rlkit.sandbox.spec import MIB
from rlkit.types import Message

ENTRY = "run"
POLISH = "polish"
BUDGET_SHARE = 0.9
"""Of the time limit that a program is told it may use."""

_LIBRARIES = ("numpy", "scipy", "cvxpy", "sympy", "numba")
_FENCE = re.compile(
    # A block that was cut off ends where the next one begins, and is none.
    r"^[ \t]*```[ \t]*(?P<language>[\w+.-]*)[^\n]*\n(?P<body>(?:(?!^[ \t]*```[ \t]*[\w+.-]).)*?)^[ \t]*```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_PYTHON = ("python", "python3", "py")
_THINKING_BEGINS, _THINKING_ENDS = "<think>", "</think>"
_CHANNEL, _FINAL = "<|channel|>", "<|channel|>final<|message|>"
_FORMAT = ".10f"


@dataclass(frozen=True, slots=True)
class Terms:
    """What programs are given, as it is said and as it holds.

    Args:
        helpers: whether the problem's local search may be called.
    """

    limits: ProgramLimits
    helpers: bool = True

    @property
    def budget_s(self) -> float:
        """Seconds that a program is told it may use."""
        return float(f"{self.limits.timeout_s * BUDGET_SHARE:.3g}")


def messages(problem: Problem, parent: State, terms: Terms) -> list[Message]:
    """The conversation that asks for a program."""
    parts = [problem.statement(), _start(problem, parent), _contract(problem, parent, terms)]
    return [{"role": "user", "content": "\n\n".join(parts)}]


def final_code(text: str) -> str | None:
    """The last Python block of an answer; None where there is none.

    Args:
        text: the answer as the chat format reads it. Formats leave the marks of thinking in what was cut off before the
            answer, or has an end of thinking without a beginning; what is thinking by these is left out.
    """
    answer = _answer(text)
    blocks = [(found["language"].lower(), found["body"]) for found in _FENCE.finditer(answer)]
    code = [body for language, body in blocks if language in _PYTHON] or [body for name, body in blocks if not name]
    return code[-1] if code and code[-1].strip() else None


def _answer(text: str) -> str:
    if _CHANNEL in text:
        return text.rpartition(_FINAL)[2] if _FINAL in text else ""
    answer = text.rpartition(_THINKING_ENDS)[2]
    return answer.partition(_THINKING_BEGINS)[0]


def _start(problem: Problem, parent: State) -> str:
    shape = "x".join(map(str, parent.construction.shape))
    size = f"{shape} values" if parent.construction.ndim > 1 else f"{len(parent.construction)} values"
    sentences = [f"You start from a construction of {size} with {problem.symbol} = {parent.value:{_FORMAT}}."]
    known = list[str]()
    if problem.baseline is not None:
        known.append(f"the best found by hand is {problem.baseline:g}")
    if problem.best_known is not None:
        known.append(f"the best ever published is {problem.best_known:.9g}")
    if known:
        sentences.append(f"For comparison, {' and '.join(known)}.")
    sentences.append(f"Improve on it: {problem.direction}.")
    if not parent.program:
        return " ".join(sentences)
    before = "" if parent.parent_value is None else f", starting from {parent.parent_value:{_FORMAT}}"
    after = " and a local search after it" if parent.polished else ""
    sentences.append(f"It was made by this program{after}{before}:")
    text = f"{' '.join(sentences)}\n\n```python\n{parent.program.strip()}\n```"
    if stdout := parent.stdout.strip():
        text += f"\n\nThe end of what it printed:\n\n```text\n{stdout}\n```"
    return text


def _contract(problem: Problem, parent: State, terms: Terms) -> str:
    limits = terms.limits
    shape = parent.construction.shape
    given = [f"- `{problem.initial}`: a NumPy array of shape {shape}, the construction that you start from."]
    if terms.helpers and problem.polish is not None:
        given.append(
            f"- `{POLISH}(construction, seconds)`: a local search that returns a construction that is at least as good."
        )
    processors = "one processor" if limits.cpus == 1 else f"{limits.cpus} processors"
    return (
        f"Write a Python program that finds a better construction, in one ```python block of your final answer. It "
        f"must define\n\n    def {ENTRY}(seed, budget_s):\n\nwhich returns {problem.shape}. Whatever value a program "
        "claims is not read: the verifier recomputes it from the numbers.\n\n"
        f"These are global variables of your program:\n\n{chr(10).join(given)}\n\n"
        f"`budget_s` is {terms.budget_s:g}; after {limits.timeout_s:g} seconds the program is ended and counts as "
        f"failed. It has {processors} and {limits.memory_bytes // MIB} MiB of memory. It can import Python's standard "
        f"library and {_installed_libraries()}. It cannot write files, start processes or use the network.\n\n"
        f"You are rewarded for the construction that it returns ({problem.direction}), and get 0 if it returns none "
        "that is valid."
    )


def _installed_libraries() -> str:
    libraries = list[str]()
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            libraries.append(f"{name} {importlib.metadata.version(name)}")
    *others, last = libraries  # NumPy is always there
    return f"{', '.join(others)} and {last}" if others else last
