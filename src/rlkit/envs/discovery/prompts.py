"""Prompts of a search, and extraction of the program from a reply.

Invariant: every number in a prompt is exact: length and value of the parent, enforced limits, and versions of installed
libraries.
"""

from __future__ import annotations

import importlib.metadata
import re
from contextlib import suppress

from rlkit.envs.discovery.problem import Problem
from rlkit.envs.discovery.settings import PlaySettings
from rlkit.envs.discovery.state import State
from rlkit.sandbox.spec import MIB
from rlkit.types import Message

ENTRY = "run"
POLISH = "polish"

_LIBRARIES = ("numpy", "scipy", "cvxpy", "sympy", "numba")
_FENCE = re.compile(
    # A block without an end is ignored; it ends where the next block begins.
    r"^[ \t]*```[ \t]*(?P<language>[\w+.-]*)[^\n]*\n(?P<body>(?:(?!^[ \t]*```[ \t]*[\w+.-]).)*?)^[ \t]*```[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
_PYTHON = ("python", "python3", "py")
_THINKING_START, _THINKING_END = "<think>", "</think>"
_CHANNEL, _FINAL = "<|channel|>", "<|channel|>final<|message|>"
_FORMAT = ".10f"


def make_messages(problem: Problem, parent: State, play: PlaySettings) -> list[Message]:
    """Return the conversation that asks for a program."""
    parts = [problem.statement(), _describe_start(problem, parent, play), _describe_contract(problem, parent, play)]
    return [{"role": "user", "content": "\n\n".join(parts)}]


def extract_code(text: str) -> str | None:
    """Return the last Python block of a reply, or None.

    Args:
        text: reply as parsed by the chat format. Thinking that the format left in the text is removed: the format
            leaves it if the reply was truncated before the answer, or has only an end mark.
    """
    answer = _strip_thinking(text)
    blocks = [(block["language"].lower(), block["body"]) for block in _FENCE.finditer(answer)]
    code = [body for language, body in blocks if language in _PYTHON] or [body for name, body in blocks if not name]
    return code[-1] if code and code[-1].strip() else None


def _strip_thinking(text: str) -> str:
    if _CHANNEL in text:
        return text.rpartition(_FINAL)[2] if _FINAL in text else ""
    answer = text.rpartition(_THINKING_END)[2]
    return answer.partition(_THINKING_START)[0]


def _describe_start(problem: Problem, parent: State, play: PlaySettings) -> str:
    size = "x".join(map(str, parent.construction.shape))
    sentences = [f"You start from a construction of {size} values with {problem.symbol} = {parent.value:{_FORMAT}}."]
    if play.record:
        sentences.append(f"The best published value is {problem.published[0].value}.")
    if play.target is not None:
        sentences.append(f"The target is {play.target!r}.")
    sentences.append(f"Improve on it: {problem.direction}.")
    if not parent.program:
        return " ".join(sentences)
    origin = "" if parent.parent_value is None else f", starting from {parent.parent_value:{_FORMAT}}"
    polishing = " and a local search after it" if parent.polished else ""
    sentences.append(f"It was made by this program{polishing}{origin}:")
    text = f"{' '.join(sentences)}\n\n```python\n{parent.program.strip()}\n```"
    if stdout := parent.stdout.strip():
        text += f"\n\nThe end of what it printed:\n\n```text\n{stdout}\n```"
    return text


def _describe_contract(problem: Problem, parent: State, play: PlaySettings) -> str:
    limits = play.limits
    shape = parent.construction.shape
    variables = [f"- `{problem.initial}`: a NumPy array of shape {shape}, the construction that you start from."]
    if play.helpers and problem.polish is not None:
        variables.append(
            f"- `{POLISH}(construction, seconds)`: a local search that returns a construction that is at least as good."
        )
    processors = "one processor" if limits.cpus == 1 else f"{limits.cpus} processors"
    return (
        f"Write a Python program that finds a better construction, in one ```python block of your final answer. It "
        f"must define\n\n    def {ENTRY}(seed, budget_s):\n\nwhich returns {problem.shape}. Whatever value a program "
        "claims is not read: the verifier recomputes it from the numbers.\n\n"
        f"These are global variables of your program:\n\n{chr(10).join(variables)}\n\n"
        f"`budget_s` is {play.budget_s:g}; after {limits.timeout_s:g} seconds the program is ended and counts as "
        f"failed. It has {processors} and {limits.memory_bytes // MIB} MiB of memory. It can import Python's standard "
        f"library and {_list_libraries()}. It cannot write files, start processes or use the network.\n\n"
        f"You are rewarded for the construction that it returns ({problem.direction}), and get 0 if it returns none "
        "that is valid."
    )


def _list_libraries() -> str:
    libraries = list[str]()
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            libraries.append(f"{name} {importlib.metadata.version(name)}")
    *others, last = libraries  # NumPy is always installed
    return f"{', '.join(others)} and {last}" if others else last
