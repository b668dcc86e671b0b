"""Measure how many small changes (mutants) of the code the tests detect.

    uv run --with cosmic-ray python scripts/mutation.py --out mutation.json
    uv run --with cosmic-ray python scripts/mutation.py --again mutation.json --out again.json   # only its survivors

Mutants are the changes of cosmic-ray and removed statements. The script draws `--count` places in the code and one
mutant for each, so a place with many mutants has the same weight as a place with one. It excludes annotations and
`TYPE_CHECKING`, which tests never evaluate, and swaps of `==` and `is`, which differ for few values. The order is
random, so an interrupted measurement is a random sample too.

Each mutant is applied to a copy of the package. The tests of its module then run in a separate process, forked from one
that has loaded the heavy libraries. A mutant is killed if a test fails, or if its tests take more than `--limit`
seconds, several times their normal duration: such a mutant makes them wait forever.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import difflib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor, mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "rlkit"

_DATA = "tests/test_types.py"
_JOURNAL = "tests/store/test_journal.py"
_STORE = "tests/store/test_store.py"
_RESUME = "tests/resume/test_resume.py"
_PLAYED = "retried_only or resume_retries or in_flight or size or weights_that"
_RECOVERED = "replay or checkpoint or last_step or stopped or is_retried or unobserved or substeps or missing or newest"
_STORED = [_STORE, "tests/resume/test_missing_files.py", _RESUME]
_BATCHES = ["tests/algorithms/test_datums.py", "tests/algorithms/test_advantages.py"]
TESTS = {
    "store/__init__.py": [
        "tests/store/test_lock.py",
        *_STORED,
        "-k",
        "not test_resume or old_segments or on_the_disk or incomplete_record",
    ],
    "store/metadata.py": [*_STORED, "-k", "not test_resume or is_an_error or by_name or started or not_replaced"],
    "tools/run_ending.py": ["tests/tools/test_run_ending.py"],
    "store/history.py": [
        _DATA,
        "tests/metrics/test_diagnostics.py",
        *_STORED,
        "-k",
        "not test_resume or by_name or is_reported or damaged_record or incomplete or lost_draw",
    ],
    "store/codec.py": ["tests/store/test_group_scored.py", _JOURNAL, "-k", "scored or episode or json"],
    "store/table.py": [_DATA, _JOURNAL, "-k", "test_types or table or token"],
    "store/journal.py": [_DATA, "tests/_util/files/test_files.py", _JOURNAL, "-k", "not (episode or table or token)"],
    "_util/files/json_lines.py": [
        "tests/_util/files/test_json_lines.py",
        _STORE,
        _RESUME,
        "-k",
        "test_json_lines or test_store or line or by_name",
    ],
    "_util/files/lock.py": ["tests/_util/files/test_lock.py"],
    "algorithms/datums.py": [
        _DATA,
        *_BATCHES,
        "tests/algorithms/test_shaping.py",
        "tests/algorithms/test_kl_penalty.py",
        "tests/tools/test_audit.py",
        "-k",
        "not test_advantages or together",
    ],
    "algorithms/advantages.py": [_DATA, *_BATCHES, "-k", "not (failed_calls or run_learns or resumed_run)"],
    "algorithms/estimators.py": [
        "tests/algorithms/test_estimators.py",
        "-k",
        "not (finite or order or constant_added or higher_reward or unit)",
    ],
    "rollout/player.py": [
        _DATA,
        "tests/rollout/test_player.py",
        "tests/rollout/test_request_batcher.py",
        "tests/store/test_group_scored.py",
        _RESUME,
        "-k",
        f"not test_resume or {_PLAYED}",
    ],
    "rollout/runner.py": [
        "tests/rollout/test_runner.py",
        "tests/rollout/test_player.py",
        "tests/_util/test_loop_holds.py",
    ],
    "_util/redaction.py": ["tests/_util/test_redaction.py"],
    "training/schedule.py": [_DATA, "tests/training/test_schedule.py"],
    "training/step.py": [
        _DATA,
        "tests/training/test_step.py",
        _RESUME,
        "-k",
        "not test_resume or substeps or stream or learning",
    ],
    "training/learner.py": [_DATA, _RESUME, "tests/test_faults.py", "-k", f"test_types or {_RECOVERED}"],
}
"""Arguments of pytest for each module: the tests that detect most in the least time."""

_HEAVY = ["numpy", "pandas", "pyarrow.parquet", "pydantic", "httpx", "torch", "tinker"]
_EXAMPLES = 20
_OPTIONS = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=line", "--timeout=40"]
_OPTIONS += [
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
]  # some modules are loaded before pytest can rewrite them
_ALIKE = {f"core/ReplaceComparisonOperator_{name}" for name in ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")}


class StatementRemover(Operator):
    """Replace a call, a `raise` or an assignment to an attribute or an item by `pass`."""

    def mutation_positions(self, node):  # noqa: D102  cosmic-ray's protocol
        if node.type == "simple_stmt" and self._is_removable(node.children[0]):
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):  # noqa: D102  cosmic-ray's protocol
        (replacement,) = get_ast("pass\n").children[:1]
        replacement.children[0].prefix = node.get_first_leaf().prefix
        return replacement

    @staticmethod
    def _is_removable(statement) -> bool:
        if statement.type in ("expr_stmt", "atom_expr", "await", "raise_stmt", "del_stmt"):
            return statement.type != "expr_stmt" or statement.children[0].type == "atom_expr"
        return False

    @classmethod
    def examples(cls):  # noqa: D102  cosmic-ray's protocol
        return ()


@dataclass(frozen=True, slots=True)
class Mutant:
    """The `occurrence`-th change by an operator in a module, at `line` and `column`."""

    module: str
    operator: str
    occurrence: int
    line: int
    column: int

    def code(self, source: str) -> str:
        """Return the module with the change."""
        code = mutate_code(source, _operator(self.operator), self.occurrence)
        assert code is not None
        return code


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a mutant: `killed`, `survived` or `timeout`."""

    mutant: Mutant
    outcome: str
    seconds: float
    diff: str


def _operator(name: str) -> Operator:
    return StatementRemover() if name == "rlkit/StatementRemover" else get_operator(name)()


def _operators() -> list[str]:
    named = [name for name in operator_names() if not name.startswith("core/Variable") and name not in _ALIKE]
    return ["rlkit/StatementRemover", *sorted(named)]


class _Places(MutationVisitor):
    """Record the places where an operator would change the code."""

    def __init__(self, operator: Operator) -> None:
        super().__init__(-1, operator)
        self.starts: list[tuple[int, int] | None] = []  # None for the star of a signature or a call

    def visit(self, node):
        # The star of a signature or of a call is not a product.
        starred = node.type == "operator" and node.value in ("*", "**") and node.parent.type not in ("term", "power")
        self.starts += [None if starred else start for start, _ in self.operator.mutation_positions(node)]
        return node


def _unevaluated(source: str) -> list[ast.expr]:
    """Return annotations, values of type aliases and `TYPE_CHECKING` conditions, which tests never evaluate."""
    nodes: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            nodes.append(node.annotation)
        elif isinstance(node, ast.TypeAlias):
            nodes.append(node.value)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes.append(node.test)
    return [node for node in nodes if node is not None]


def mutants(module: str) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    source = (PACKAGE / module).read_text()
    spans = [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in _unevaluated(source)
    ]
    tree = get_ast(source)
    for name in _operators():
        places = _Places(_operator(name))
        places.walk(tree)
        for occurrence, place in enumerate(places.starts):
            if place is not None and not any(start <= place < end for start, end in spans):
                yield Mutant(module, name, occurrence, *place)


def sample(modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Draw `count` places from all modules, and one mutant for each place."""
    places: dict[tuple[str, int, int], list[Mutant]] = {}
    for module in modules:
        for mutant in mutants(module):
            places.setdefault((module, mutant.line, mutant.column), []).append(mutant)
    rng = random.Random(seed)
    drawn_places = rng.sample(sorted(places), min(count, len(places)))
    return [rng.choice(places[place]) for place in drawn_places]


def run_tests(paths: Sequence[str], overlay: Path, *, limit_s: float, log: Path) -> str:
    """Run tests on the package in `overlay` in a separate process, until the first failure."""
    child = os.fork()
    if child == 0:
        os.setsid()  # so that processes that the tests leave behind can be killed with them
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["PYTHONPATH"] = str(overlay)
        sys.path.insert(0, str(overlay))
        code = 3
        try:
            code = int(pytest.main([*_OPTIONS, *paths]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            _end_session(child)
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.02)
    _end_session(child)
    os.waitpid(child, 0)
    return "timeout"


def _end_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _try(mutant: Mutant, overlay: Path, *, limit_s: float) -> Result:
    target = overlay / "rlkit" / mutant.module
    source = target.read_text()
    changed = mutant.code(source)
    diff = difflib.unified_diff(
        source.splitlines(), changed.splitlines(), mutant.module, mutant.operator, n=0, lineterm=""
    )
    began = time.monotonic()
    try:
        _replace(target, changed)
        outcome = run_tests(TESTS[mutant.module], overlay, limit_s=limit_s, log=overlay / "log")
    finally:
        _replace(target, source)
    return Result(mutant, outcome, time.monotonic() - began, "\n".join(diff))


def _replace(target: Path, text: str) -> None:
    target.write_text(text)
    for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
        compiled.unlink()  # Python would use it for a file with the same size and time


def report(results: Sequence[Result]) -> str:
    """Render the diffs of the survivors and a table of modules."""
    lines = [
        f"{result.mutant.module}:{result.mutant.line} {result.mutant.operator}\n{result.diff}\n"
        for result in results
        if result.outcome == "survived"
    ]
    lines.append(f"{'module':20} {'killed':>8} {'timeout':>8} {'survived':>8} {'share':>7}")
    for name in [*TESTS, "all"]:
        counts = Counter(result.outcome for result in results if name in (result.mutant.module, "all"))
        if total := counts.total():
            row = f"{counts['killed']:8} {counts['timeout']:8} {counts['survived']:8}"
            lines.append(f"{name:20} {row} {1 - counts['survived'] / total:7.1%}")
    return "\n".join(lines)


def _check(modules: Sequence[str], overlay: Path) -> None:
    """Exit unless the tests of these modules pass on unchanged code. A module with a survivor needs no such check."""
    for paths in dict.fromkeys(tuple(TESTS[module]) for module in modules):
        if run_tests(paths, overlay, limit_s=1800, log=overlay / "log") != "survived":
            sys.exit(f"{' '.join(paths)} fail on unchanged code:\n{(overlay / 'log').read_text()}")


def main() -> None:
    """Draw mutants, test each, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--module", choices=TESTS, action="append", help="use only this module; repeatable")
    parser.add_argument("--again", type=Path, help="repeat only the survivors in this file of results")
    parser.add_argument("--out", type=Path, default=Path("mutation.json"), help="output file of the results")
    parser.add_argument("--limit", type=float, default=400.0, help="time limit of a mutant's tests in seconds")
    options = parser.parse_args()
    selected = sample(options.module or list(TESTS), options.count, options.seed)
    if options.again is not None:
        earlier = json.loads(options.again.read_text())
        survivors = [result["mutant"] for result in earlier if result["outcome"] == "survived"]
        selected = [Mutant(**fields) for fields in survivors]
    os.nice(5)
    os.chdir(ROOT)
    for name in _HEAVY:
        importlib.import_module(name)
    # Tests take from this profile what they do not set themselves: the same examples for every mutant, and few of them.
    phases = (Phase.explicit, Phase.generate)  # a failure is enough, so examples are not simplified
    settings.register_profile("mutation", derandomize=True, database=None, max_examples=_EXAMPLES, phases=phases)
    settings.load_profile("mutation")
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder)
        shutil.copytree(PACKAGE, overlay / "rlkit", ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(overlay / "rlkit", quiet=1)
        for number, mutant in enumerate(selected, 1):
            results.append(_try(mutant, overlay, limit_s=options.limit))
            options.out.write_text(json.dumps([asdict(result) for result in results], indent=1))
            description = f"{mutant.module}:{mutant.line} {mutant.operator}"
            print(f"{number:4} {results[-1].outcome:8} {results[-1].seconds:6.1f} s  {description}", flush=True)
        survived = {result.mutant.module for result in results if result.outcome == "survived"}
        _check(sorted({mutant.module for mutant in selected} - survived), overlay)
    print(report(results))


if __name__ == "__main__":
    main()
