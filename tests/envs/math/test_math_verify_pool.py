from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from rlkit.envs.math import math_verify_pool
from rlkit.envs.math.grader import GoldError, Grade, Grader
from tests.limits import HANG_S

HANGING = r"99999999!"
LIMIT_S = 5.0


ask = partial(math_verify_pool.ask, processes=1, limit_s=LIMIT_S)


def test_math_verify_answers_and_is_killed_if_it_hangs() -> None:
    questions = [("6", r"1+2+3"), (HANGING, r"\sqrt{2}"), ("7", "6"), ("1", "")]
    answers = [ask(*question) for question in questions]
    assert [future.result() for future in answers] == ["yes", "timeout", "no", "gold unread"]


def test_math_verify_decides_answers_that_rlkit_cannot_parse() -> None:
    grader = Grader(limit_s=LIMIT_S, processes=1)

    async def grades() -> list[Grade]:
        pairs = ((r"\sum_{i=1}^{3} i", "6"), (r"\int_0^1 x\,dx", r"\int_0^1 x dx"), (r"\undefinedmacro{1}", "6"))
        return [await grader.grade(*pair) for pair in pairs]

    assert asyncio.run(grades()) == [Grade(False, "unparsed"), Grade(True, "math-verify"), Grade(False, "math-verify")]
    with pytest.raises(GoldError):
        asyncio.run(grader.grade("6", ""))


def test_math_verify_compares_whole_answers_only() -> None:
    answers = (r"41 \star 42", r"\undefinedmacro 41, 42", r"x \in \{41, 42\} \in S", r"41, 42, \dots", "41, 42, ...")
    grader = Grader(limit_s=LIMIT_S, processes=1)

    async def grades() -> list[Grade]:
        return [await grader.grade(answer, "42") for answer in answers]

    assert not any(grade.correct for grade in asyncio.run(grades()))
    assert ask(r"\gcd(42, 84)", "42").result() == "yes"


def test_a_process_that_cannot_load_math_verify_in_time_ends(tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text("import time; time.sleep(1000)")
    code = "from rlkit.envs.math import math_verify_worker as worker; worker.START_S = 0.2; worker.main(1.0)"
    loading = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=HANG_S, check=False
    )
    assert loading.returncode == -signal.SIGALRM


def test_a_fork_starts_its_own_processes() -> None:
    ask("1", "1").result()
    if (pid := os.fork()) == 0:
        answer = ask("1", "1").result(timeout=HANG_S)
        os._exit(0 if answer == "yes" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
