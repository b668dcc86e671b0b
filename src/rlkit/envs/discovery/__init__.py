"""Search for better constructions of open mathematical problems with programs written by a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from pydantic import ConfigDict, Field, JsonValue, with_config

from rlkit.errors import UsageError, did_you_mean, missing_extra

if TYPE_CHECKING:
    from rlkit.envs.discovery.archive import Archive, Reuse, ReuseRule
    from rlkit.envs.discovery.problem import Problem
    from rlkit.envs.discovery.source import Discovery

__all__ = ["discovery", "make_problem"]

PROBLEMS = {
    "erdos": "rlkit.envs.discovery.problems.erdos:Erdos",
    "autocorrelation_1": "rlkit.envs.discovery.problems.autocorrelation:FirstAutocorrelation",
    "autocorrelation_2": "rlkit.envs.discovery.problems.autocorrelation:SecondAutocorrelation",
    "autocorrelation_3": "rlkit.envs.discovery.problems.autocorrelation:ThirdAutocorrelation",
    "autocorrelation_3_absolute": "rlkit.envs.discovery.problems.autocorrelation:ThirdAbsoluteAutocorrelation",
    "circle_packing": "rlkit.envs.discovery.problems.packing:CirclePacking",
    "kissing": "rlkit.envs.discovery.problems.subsets:Kissing",
    "no_isosceles": "rlkit.envs.discovery.problems.subsets:NoIsosceles",
}
"""Import paths of the built-in problems by name."""

type Count = Annotated[int, Field(ge=1)]
type Seconds = Annotated[float, Field(gt=0)]
type Note = Callable[[str], None]


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
class PromptContents(TypedDict, total=False):
    """Results that prompts state beside the value of the state that a program starts from; by default none."""

    record: bool
    """State the best published value."""
    target: float
    """Value to reach."""


def discovery(
    *,
    problem: str | Problem = "erdos",
    options: dict[str, JsonValue] | None = None,
    start: str = "random",
    starts: Count | None = None,
    reuse: Literal["epsilon_greedy", "puct", "fixed", "none"] = "puct",
    buffer_size: Count | None = None,
    epsilon: Annotated[float, Field(ge=0, le=1)] | None = None,
    puct_c: Annotated[float, Field(ge=0)] | None = None,
    program_timeout_s: Seconds = 60.0,
    memory_mb: Count = 2048,
    cpus: Count = 1,
    workers: Count | None = None,
    min_isolation: Literal["none", "limits", "os"] | None = None,
    helpers: bool = True,
    polish_s: Annotated[float, Field(ge=0)] = 0.0,
    prompt: PromptContents | None = None,
    seed: int = 0,
    note: Note = lambda message: None,
) -> Discovery:
    """Return a search for better constructions of an open problem; `docs/discovery.md` describes it.

    Args:
        problem: name of a problem, or `package.module:Class` or `file.py:Class` for your own; in Python, an object.
        options: options of the problem, such as `n_points`, `circles` or `dimension`.
        start: `random`; the name of a published construction; a JSON file with `values` and optionally the `program`
            that made them; or, for `erdos`, `flat`: h = 1/2 with `n_points` pieces.
        starts: number of random initial constructions; by default 8 with `puct`, otherwise 1.
        buffer_size: maximum number of states in the archive; by default 1000 with `puct` and 16 with `epsilon_greedy`.
        workers: maximum number of concurrent programs of a process that plays rollouts; by default the number of its
            processors divided by `cpus`.
        min_isolation: required isolation of programs; by default `os` on Linux, and `limits` elsewhere.
        helpers: let programs call the problem's local search, if SciPy is installed.
        polish_s: seconds of local search on each construction before it is archived; improvements earn no reward.
        prompt: `record: true` states the best published value in the prompt, and `target` a value to reach.

    Raises:
        UsageError: the problem does not exist, or an argument is invalid.
        MissingError: SciPy is required for `polish_s` and not installed.
    """
    from rlkit.envs.discovery.settings import PlaySettings
    from rlkit.envs.discovery.source import Discovery, make_archive
    from rlkit.sandbox.runners.programs import ProgramLimits
    from rlkit.sandbox.spec import MIB

    mathematics = make_problem(problem, options or {})
    helpers = _has_scipy(mathematics, polish_s) and helpers
    preload = (mathematics.polish.partition(":")[0],) if mathematics.polish and (helpers or polish_s) else ()
    rule = _make_reuse_rule(reuse, buffer_size, epsilon, puct_c)
    archive = make_archive(mathematics, rule, start=start, starts=starts, seed=seed)
    limits = ProgramLimits(timeout_s=program_timeout_s, memory_bytes=memory_mb * MIB, cpus=cpus)
    if prompt and prompt.get("record") and not mathematics.published:
        raise UsageError(f"prompt.record: {mathematics.name} has no published value; leave it out")
    _report(archive, min_isolation, note)
    play = PlaySettings(limits, helpers, polish_s, workers, min_isolation, preload, **(prompt or {}))
    return Discovery(archive, play)


def _has_scipy(problem: Problem, polish_s: float) -> bool:
    """Return whether SciPy is installed; raise an error if `polish_s` needs a local search that cannot run."""
    if polish_s and problem.polish is None:
        raise UsageError(f"polish_s: {problem.name} has no local search; set it to 0")
    has_scipy = find_spec("scipy") is not None
    if polish_s and not has_scipy:
        raise missing_extra("scipy")
    return has_scipy


def _make_reuse_rule(reuse: Reuse, buffer_size: int | None, epsilon: float | None, puct_c: float | None) -> ReuseRule:
    from rlkit.envs.discovery.archive import ReuseRule

    for name, value, user in (("epsilon", epsilon, "epsilon_greedy"), ("puct_c", puct_c, "puct")):
        if value is not None and reuse != user:
            raise UsageError(f"{name}: has no effect with reuse {reuse!r}; leave it out, or set reuse to {user}")
    if buffer_size is not None and reuse in ("fixed", "none"):
        raise UsageError(f"buffer_size: has no effect with reuse {reuse!r}, which does not keep states")
    size = buffer_size or (1000 if reuse == "puct" else 16)
    return ReuseRule(reuse, size, 0.125 if epsilon is None else epsilon, 1.0 if puct_c is None else puct_c)


def _report(archive: Archive, min_isolation: str | None, note: Note) -> None:
    from rlkit.envs.discovery.problem import describe_known_results

    problem = archive.problem
    results = [f"initial {problem.symbol} = {archive.best.value:.10g}", describe_known_results(problem)]
    note(f"{problem.name}, {problem.direction}: {'; '.join(filter(None, results))}")
    if sys.platform != "linux" and min_isolation is None:
        note("PROGRAMS RUN WITH RESOURCE LIMITS ONLY on this system: they can read your files and use the network")


def make_problem(problem: str | Problem, options: dict[str, JsonValue]) -> Problem:
    """Return a problem by its name or import path; an object is returned unchanged.

    Raises:
        UsageError: no problem has that name, or it does not accept the options.
    """
    from rlkit.config.loading.arguments import bind
    from rlkit.config.loading.objects import load_object
    from rlkit.envs.discovery.problem import Problem

    if isinstance(problem, Problem):
        if options:
            raise UsageError("options: have no effect if the problem is an object; leave them out")
        return problem
    if problem not in PROBLEMS and ":" not in problem:
        raise UsageError(
            f"problem: there is no problem {problem!r}.{did_you_mean(problem, PROBLEMS)} Known: {', '.join(PROBLEMS)}, "
            "or your own as file.py:Class"
        )
    factory = load_object(PROBLEMS.get(problem, problem), field="problem")
    if not callable(factory):
        raise UsageError(f"problem: {problem} is not a class")
    missing: frozenset[str] = getattr(factory, "__abstractmethods__", frozenset())
    if missing:
        raise UsageError(f"problem: {problem} lacks the methods {', '.join(sorted(missing))}; define them")
    instance = factory(**bind(factory, options, field="options", defaults={}, load=load_object))
    if not isinstance(instance, Problem):
        raise UsageError(f"problem: {problem} must return a discovery Problem, not a {type(instance).__name__}")
    return instance
