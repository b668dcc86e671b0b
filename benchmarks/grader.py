"""Compare graders of mathematics on labelled answers: correctness, speed, and hangs.

    uv run --with pylatexenc benchmarks/grader.py
    uv run --with pylatexenc benchmarks/grader.py --cases mine.jsonl --limit-s 10

Each grader runs in a separate process. If a case takes longer than the limit, the process is killed and the case counts
as a hang. Times are CPU times of a call. A case is a line with `gold`, `answer`, `equivalent` and `kind`. Kinds that
begin with `policy_` depend on a convention and are counted separately. The last part submits 10,000 gradings at once,
1 % of them expressions that make graders hang, and measures how long an iteration of the event loop takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

CASES = Path(__file__).parents[1] / "tests" / "data" / "math" / "grader_cases.jsonl"
START_S = 180
HANGING = r"\lim_{x\to 0} \frac{99999999!}{9**9**9}"
SLOW = r"\frac{\mathrm{d}}{\mathrm{d}x} (x+1)^{100000}"

type Grade = Callable[[str, str], bool]


@dataclass(frozen=True)
class Case:
    gold: str
    answer: str
    equivalent: bool
    kind: str


@dataclass(frozen=True)
class Result:
    """Result of a case; `verdict` is None if the grader was killed."""

    verdict: bool | None
    cpu_s: float


def rlkit_compare() -> Grade:
    from rlkit.envs.math.grader import compare

    return lambda answer, gold: compare(answer, gold) == "yes"


def rlkit_grader() -> Grade:
    from rlkit.envs.math.grader import GoldError, Grader

    grader = Grader(processes=1)

    def grade(answer: str, gold: str) -> bool:
        try:
            return asyncio.run(grader.grade(answer, gold)).correct
        except GoldError:
            return False

    return grade


def math_verify() -> Grade:
    from math_verify import parse, verify

    def grade(answer: str, gold: str) -> bool:
        gold_parsed = parse(rf"\boxed{{{gold}}}")  # pyright: ignore  its types are partly unknown
        answer_parsed = parse(rf"\boxed{{{answer}}}")  # pyright: ignore  its types are partly unknown
        return verify(gold_parsed, answer_parsed)  # pyright: ignore  its types are partly unknown

    return grade


def cookbook() -> Grade:
    from tinker_cookbook.recipes.math_rl.math_grading import grade_answer

    return grade_answer


GRADERS: dict[str, Callable[[], Grade]] = {
    "rlkit, in process": rlkit_compare,
    "rlkit with math-verify": rlkit_grader,
    "math-verify": math_verify,
    "tinker-cookbook": cookbook,
}


def serve(name: str, connection: Connection) -> None:
    logging.disable(logging.CRITICAL)  # some log each case that they abandon
    grade = GRADERS[name]()
    grade("1", "1")
    connection.send(None)
    while True:
        case: Case = connection.recv()
        start_s = time.process_time()
        try:
            verdict = bool(grade(case.answer, case.gold))
        except Exception:  # a grader that raises rejects the answer
            verdict = False
        connection.send(Result(verdict, time.process_time() - start_s))


def results(name: str, cases: list[Case], limit_s: float) -> list[Result]:
    context = multiprocessing.get_context("spawn")
    outcomes: list[Result] = []
    process = None
    parent_end, child_end = context.Pipe()
    for case in cases:
        if process is None:
            parent_end, child_end = context.Pipe()
            process = context.Process(target=serve, args=(name, child_end))
            process.start()
            if not parent_end.poll(START_S):
                raise SystemExit(f"{name} does not start")
            parent_end.recv()
        parent_end.send(case)
        if parent_end.poll(limit_s):
            outcomes.append(parent_end.recv())
        else:
            process.kill()
            process.join()
            process = None
            outcomes.append(Result(None, limit_s))
    if process is not None:
        process.kill()
        process.join()
    return outcomes


def row(name: str, cases: list[Case], outcomes: list[Result]) -> str:
    pairs = list(zip(cases, outcomes, strict=True))
    judged = [(case, result) for case, result in pairs if not case.kind.startswith("policy_")]
    policy = [(case, result) for case, result in pairs if case.kind.startswith("policy_")]
    right = sum(bool(result.verdict) == case.equivalent for case, result in judged)
    false_positives = sum(bool(result.verdict) and not case.equivalent for case, result in judged)
    times_us = sorted(result.cpu_s * 1e6 for _, result in pairs if result.verdict is not None)
    cells = [
        f"{right / len(judged):.1%}",
        f"{false_positives} of {sum(not case.equivalent for case, _ in judged)}",
        f"{sum(bool(result.verdict) == case.equivalent for case, result in policy)} of {len(policy)}",
        f"{sum(times_us) / len(times_us):,.0f} µs",
        f"{times_us[int(0.99 * len(times_us))]:,.0f} µs",
        str(sum(result.verdict is None for _, result in pairs)),
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


async def measure_loop_holds(count: int) -> tuple[float, float, float]:
    """Return seconds: of the longest iteration of the event loop, in wall time and in CPU time, and of all gradings.

    On a busy machine the wall time includes the work of other programs.
    """
    from rlkit.envs.math.grader import Grader

    grader = Grader(limit_s=0.5)
    cases = [Case(**json.loads(line)) for line in CASES.read_text().splitlines()]
    worst_s = worst_cpu_s = 0.0

    async def watch() -> None:
        nonlocal worst_s, worst_cpu_s
        while True:
            before_s, before_cpu_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0)
            worst_s = max(worst_s, time.perf_counter() - before_s)
            worst_cpu_s = max(worst_cpu_s, time.thread_time() - before_cpu_s)

    watcher = asyncio.create_task(watch())
    start_s = time.perf_counter()
    waiting: list[asyncio.Task[object]] = []
    for number in range(count):
        case = cases[number % len(cases)]
        answer = (HANGING, SLOW, "7**7**7**7", "99999999!")[number // 100 % 4] if number % 100 == 0 else case.answer
        waiting.append(asyncio.create_task(grader.grade(answer, case.gold)))
        if number % 100 == 0:
            await asyncio.sleep(0)  # creating tasks is the caller's work
    await asyncio.gather(*waiting)
    all_s = time.perf_counter() - start_s
    watcher.cancel()
    return worst_s, worst_cpu_s, all_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare graders of mathematics on labelled answers.")
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--limit-s", type=float, default=10.0)
    parser.add_argument("--graders", nargs="*", default=list(GRADERS), choices=list(GRADERS))
    parser.add_argument("--gradings", type=int, default=10_000)
    arguments = parser.parse_args()
    cases = [Case(**json.loads(line)) for line in arguments.cases.read_text().splitlines()]
    print("| grader | right | false positives | policy cases as labelled | mean | p99 | hangs |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.graders:
        print(row(name, cases, results(name, cases, arguments.limit_s)), flush=True)
    if arguments.gradings:
        worst_s, worst_cpu_s, all_s = asyncio.run(measure_loop_holds(arguments.gradings))
        print(f"\n{arguments.gradings} concurrent gradings took {all_s:.1f} s. The longest iteration of the loop took")
        print(f"{worst_s * 1e3:.0f} ms of wall time; the longest in CPU time took {worst_cpu_s * 1e3:.0f} ms.")


if __name__ == "__main__":
    main()
