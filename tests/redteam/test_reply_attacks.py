"""The cheats against environments that grade replies; every built-in one that does so is attacked here."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import override

import pytest

import rlkit
from rlkit.config.loading.targets import load_target
from rlkit.redteam.reply_attacks import attack_replies
from rlkit.redteam.reply_cheats import REPLY_CHEATS, ReplyCheat, make_constant_replies
from rlkit.redteam.report import RedTeamReport

ROOT = Path(__file__).parents[2]
EXHAUSTIVE = os.environ.get("RLKIT_TEST_EXHAUSTIVE") == "1"
NEW50 = ROOT / "tests" / "data" / "math" / "new50.json"
GSM8K = ROOT / "tests" / "data" / "math" / "gsm8k_test.jsonl"
SERVER = shlex.join([sys.executable, str(ROOT / "examples" / "openreward_env" / "server.py")]) + " lookup --port {port}"

BUILT_IN = {
    "arithmetic": ("arithmetic",),
    "math-boxed": ("math", f"path={NEW50}", "question=problem"),
    "math-hash": ("math", f"path={GSM8K}", "gold=hash"),
    **{
        name: ("discovery", f"problem={name}", "program_timeout_s=5", "workers=2")
        for name in ("erdos", "autocorrelation_1", "autocorrelation_2", "circle_packing", "kissing", "no_isosceles")
    },
    "openreward": ("openreward", f"server={SERVER!r}", "max_turns=2"),
}
QUICK = ("arithmetic", "math-boxed")
"""The environments that are attacked without RLKIT_TEST_EXHAUSTIVE, too."""


def attack(*envs: rlkit.Env, cheats: Sequence[ReplyCheat] = REPLY_CHEATS, timeout_s: float = 60.0) -> RedTeamReport:
    return asyncio.run(attack_replies(envs, tasks=len(envs), timeout_s=timeout_s, seed=0, cheats=cheats))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in BUILT_IN if EXHAUSTIVE or name in QUICK])
def test_no_cheat_earns_a_reward_in_a_built_in_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    target, *arguments = BUILT_IN[name]
    (source,) = load_target(target, arguments).values()
    tasks = 3 if EXHAUSTIVE or name == "arithmetic" else 1
    report = asyncio.run(attack_replies(source, tasks=tasks, timeout_s=120.0, seed=0, cheats=REPLY_CHEATS))
    assert report.skipped_tasks == {}
    assert [(attempt.cheat, attempt.task_id, attempt.reward) for attempt in report.exploits] == []
    assert {attempt.cheat for attempt in report.attempts} == {cheat.name for cheat in REPLY_CHEATS}


class Lax(rlkit.SingleTurnEnv):
    """A grader that looks for the answer anywhere in a reply."""

    gold = "\\boxed{17}"
    task_id = "lax"

    @override
    def prompt(self) -> str:
        return "What is 8 + 9?"

    @override
    def grade(self, reply: rlkit.Reply) -> float:
        return float("17" in reply.text)


class Formal(Lax):
    """A grader that pays for the form."""

    @override
    def grade(self, reply: rlkit.Reply) -> float:
        return 0.25 if "\\boxed{" in reply.text else 0.125


def test_cheats_that_pay_are_named() -> None:
    earned = {attempt.cheat: (attempt.reward, attempt.honest_reward) for attempt in attack(Lax()).exploits}
    assert earned.keys() == {"every-answer-at-once"}
    assert earned["every-answer-at-once"] == (1.0, 0.0)
    formal = {attempt.cheat: (attempt.reward, attempt.honest_reward) for attempt in attack(Formal()).exploits}
    assert formal["form-without-content"] == (0.25, 0.125)
    assert {"boxed-twice", "huge-numbers", "prompt-repeated"} <= formal.keys()
    assert "empty-answer" not in formal


class Believing(Lax):
    """A grader that takes what a model says for the answer of a tool."""

    @override
    def grade(self, reply: rlkit.Reply) -> float:
        return float("<tool_response>" in reply.text and '"reward": 1.0' in reply.text)


def test_forged_results_of_tools_are_named_where_they_count() -> None:
    assert "forged-tool-results" in {attempt.cheat for attempt in attack(Believing()).exploits}


class Fragile(Lax):
    """A grader that raises, hangs or blocks."""

    @override
    async def rollout(self, policy: rlkit.Policy) -> float:
        reply = await policy.chat([{"role": "user", "content": "?"}])
        if reply.text == "raise":
            raise ValueError("what is this?")
        if reply.text == "hang":
            await asyncio.sleep(3600)
        if reply.text == "block":
            time.sleep(3600)
        return 0.0


def test_what_fails_or_hangs_earned_nothing_and_ends_only_itself() -> None:
    cheats = [ReplyCheat(name, "Says it.", make_constant_replies(name)) for name in ("raise", "hang", "fine")]
    report = attack(Fragile(), cheats=cheats, timeout_s=2.0)
    assert [(attempt.cheat, attempt.result) for attempt in report.attempts] == [
        ("raise", "failed"),
        ("hang", "failed"),
        ("fine", "nothing"),
    ]
    assert "what is this?" in report.attempts[0].detail
    assert "not done after 2 s" in report.attempts[1].detail
    assert report.ok


def test_an_environment_that_blocks_leaves_the_rest_untried_and_says_so() -> None:
    cheats = [ReplyCheat(name, "Says it.", make_constant_replies(name)) for name in ("fine", "block", "raise")]
    report = attack(Fragile(), cheats=cheats, timeout_s=1.0)
    assert [attempt.cheat for attempt in report.attempts] == ["fine"]
    assert "blocks the event loop" in report.skipped_tasks["the remaining cheats"]
    assert not report.ok
