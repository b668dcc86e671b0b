"""Open mathematical problems as environments: a model writes programs that look for better constructions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, JsonValue

from rlkit.errors import UsageError, did_you_mean, missing_extra

if TYPE_CHECKING:
    import numpy as np

    from rlkit.envs.discovery.problem import Problem
    from rlkit.envs.discovery.source import Discovery
    from rlkit.envs.discovery.state import State

__all__ = ["discovery", "problem_of"]

PROBLEMS = {
    "erdos": "rlkit.envs.discovery.problems.erdos:Erdos",
    "autocorrelation_1": "rlkit.envs.discovery.problems.autocorrelation:FirstAutocorrelation",
    "autocorrelation_2": "rlkit.envs.discovery.problems.autocorrelation:SecondAutocorrelation",
    "circle_packing": "rlkit.envs.discovery.problems.packing:CirclePacking",
}
"""Problems that have a name of their own."""

type Count = Annotated[int, Field(ge=1)]
type Seconds = Annotated[float, Field(gt=0)]
type Note = Callable[[str], None]


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
    runner: Literal["local", "ray"] = "local",
    min_isolation: Literal["none", "limits", "os"] | None = None,
    helpers: bool = True,
    polish_s: Annotated[float, Field(ge=0)] = 0.0,
    seed: int = 0,
    note: Note = lambda message: None,
) -> Discovery:
    """A search for better constructions of an open problem, by programs that a model writes.

    Args:
        problem: `erdos`, `autocorrelation_1`, `autocorrelation_2`, `circle_packing`, or one of your own as
            `package.module:Class` or `file.py:Class`; in Python, an object.
        options: of the problem, such as `n_points` or `circles`.
        start: what the search begins with: `random` constructions, the name of a published one, or a JSON file; for
            `erdos` also `flat`, h = 1/2 with `n_points` pieces. A file holds `values`, and may hold the `program` that
            made them, which is then shown to the model; records of a run are such files.
        starts: random constructions to begin with; by default 8 with `puct`, and otherwise 1.
        reuse: which states are expanded: `puct`, `epsilon_greedy`, `fixed` (those of the beginning) or `none` (a new
            random one each time).
        buffer_size: states that are kept; by default 1000 with `puct` and 16 with `epsilon_greedy`.
        epsilon: with `epsilon_greedy`, how often a random state is taken and not the best; by default 0.125.
        puct_c: with `puct`, how much states count that were expanded seldom; by default 1.
        program_timeout_s: seconds that a program may take.
        memory_mb: that a program may use.
        cpus: processors for each program.
        workers: programs at once; by default as many as there are processors for.
        runner: where programs run: `local`, or on a Ray cluster with `ray`.
        min_isolation: programs are not run with less between them and the machine; by default `os` on Linux, and
            `limits` elsewhere.
        helpers: offer the problem's local search to programs, where SciPy is installed.
        polish_s: seconds of local search that each new construction gets before it is archived. It earns no reward.
        seed: of what is drawn by chance.
        note: told what a person should know of the search.

    Raises:
        UsageError: there is no such problem, or an argument makes no sense.
        MissingError: Ray, or SciPy for `polish_s`, is asked for and not installed.
    """
    import numpy as np

    from rlkit._util.seeds import derive_seed
    from rlkit.envs.discovery.archive import Archive, ReuseRule
    from rlkit.envs.discovery.problem import known
    from rlkit.envs.discovery.prompts import Terms
    from rlkit.envs.discovery.runners import RunnerChoice
    from rlkit.envs.discovery.source import Discovery
    from rlkit.envs.discovery.task import Play
    from rlkit.sandbox.runners.programs import ProgramLimits
    from rlkit.sandbox.spec import MIB

    made = problem_of(problem, options or {})
    for name, value, user in (("epsilon", epsilon, "epsilon_greedy"), ("puct_c", puct_c, "puct")):
        if value is not None and reuse != user:
            raise UsageError(f"{name}: has no effect with reuse {reuse!r}; leave it out, or set reuse to {user}")
    if buffer_size is not None and reuse in ("fixed", "none"):
        raise UsageError(f"buffer_size: has no effect with reuse {reuse!r}, which keeps nothing")
    if starts is not None and start != "random":
        raise UsageError("starts: has no effect with a given start; leave it out")
    if polish_s and made.polish is None:
        raise UsageError(f"polish_s: {made.name} has no local search; set it to 0")
    if polish_s and find_spec("scipy") is None:
        raise missing_extra("scipy")
    rule = ReuseRule(
        reuse,
        buffer_size or (1000 if reuse == "puct" else 16),
        0.125 if epsilon is None else epsilon,
        1.0 if puct_c is None else puct_c,
    )
    archive = Archive(made, rule, derive_seed(seed, "discovery"))
    rng = np.random.default_rng(derive_seed(seed, "starts"))
    count = starts or (8 if reuse == "puct" else 1)
    archive.plant(_starting_states(made, start, count, rng))
    helpers = helpers and find_spec("scipy") is not None
    preload = (made.polish.partition(":")[0],) if made.polish is not None and (helpers or polish_s > 0) else ()
    choice = RunnerChoice(runner, workers, cpus, min_isolation, preload)
    if runner == "ray" and find_spec("ray") is None:
        raise missing_extra("ray")
    limits = ProgramLimits(timeout_s=program_timeout_s, memory_bytes=memory_mb * MIB, cpus=cpus)
    begins = f"it begins with {made.symbol} = {archive.best.value:.10g}"
    note(f"{made.name}, {made.direction}: {'; '.join(filter(None, [begins, known(made)]))}")
    if sys.platform != "linux" and min_isolation is None:
        note(
            "PROGRAMS RUN WITH LIMITS ONLY on this system: what a model writes can read your files and use the network"
        )
    return Discovery(archive, Play(Terms(limits, helpers), choice, polish_s, _json_options(made)))


def problem_of(given: str | Problem, options: dict[str, JsonValue]) -> Problem:
    """A problem by its name or its import path, or one that is there already.

    Raises:
        UsageError: there is none of that name, or it does not take these options.
    """
    from rlkit.config.loading.arguments import bind
    from rlkit.config.loading.objects import load_object
    from rlkit.envs.discovery.problem import Problem

    if isinstance(given, Problem):
        if options:
            raise UsageError("options: have no effect on a problem that is an object already")
        return given
    if given not in PROBLEMS and ":" not in given:
        raise UsageError(
            f"problem: there is no problem {given!r}.{did_you_mean(given, PROBLEMS)} Known: {', '.join(PROBLEMS)}, "
            "or your own as file.py:Class"
        )
    found = load_object(PROBLEMS.get(given, given), field="problem")
    if not callable(found):
        raise UsageError(f"problem: {given} is no class")

    def load(value: str, *, field: str) -> object:
        return load_object(value, field=field)

    made = found(**bind(found, options, field="options", offered={}, load=load))
    if not isinstance(made, Problem):
        raise UsageError(f"problem: {given} gives a {type(made).__name__}, and must give a discovery Problem")
    return made


def _starting_states(problem: Problem, start: str, count: int, rng: np.random.Generator) -> list[State]:
    import numpy as np

    from rlkit.envs.discovery.problem import Invalid, published_with_program
    from rlkit.envs.discovery.problems.erdos import Erdos
    from rlkit.envs.discovery.state import State

    program = ""
    if start == "random":
        constructions = [problem.start(rng) for _ in range(count)]
    elif start == "flat":
        if not isinstance(problem, Erdos) or problem.n_points is None:
            raise UsageError("start: flat is for the problem erdos with the option n_points")
        constructions = [np.full(problem.n_points, 0.5)]
    else:
        construction, program = published_with_program(start)
        constructions = [construction]
    try:
        starts = [problem.verified(construction) for construction in constructions]
    except Invalid as error:
        raise UsageError(f"start: {start} is no construction of {problem.name}: {error}") from None
    return [State(verified.construction, verified.value, program=program) for verified in starts]


def _json_options(problem: Problem) -> dict[str, JsonValue]:
    """Return those options of a problem that JSON can hold."""
    options = {field.name: getattr(problem, field.name) for field in fields(problem)} if is_dataclass(problem) else {}
    return {name: value for name, value in options.items() if isinstance(value, bool | int | float | str | None)}
