from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest

from rlkit.redteam.reply_cheats import REPLY_CHEATS, Situation
from rlkit.redteam.report import Result
from rlkit.redteam.task_attacks import TASK_CHEATS
from rlkit.redteam.task_cheat import PRELUDE, Seal, TaskCheat

PAGE = Path(__file__).parents[2] / "docs" / "redteam.md"

SEALED_LOCALLY: Mapping[Seal, str] = {
    "view": "sealed",
    "record": "sealed",
    "programs": "sealed with `tested_folders`",
    "tests": "up to the tests",
    "kernel": "refused",
}
SEALED_ELSEWHERE: Mapping[Seal, str] = {
    "view": "sealed without `tested_processes`",
    "record": "open where logs are mounted",
    "programs": "open",
    "tests": "up to the tests",
    "kernel": "up to the engine",
}
"""What the page says of each seal: in the local sandbox, and where the verifier shares the agent's environment."""


def test_each_cheat_has_a_name_of_its_own_and_one_sentence() -> None:
    for cheats in (TASK_CHEATS, REPLY_CHEATS):
        assert len({cheat.name for cheat in cheats}) == len(cheats)
        assert all(cheat.description.endswith(".") and cheat.description[0].isupper() for cheat in cheats)


def test_the_page_has_each_cheat_with_what_it_does_and_where_it_is_sealed() -> None:
    lines = PAGE.read_text().splitlines()
    rows = [
        f"| `{cheat.name}` | {cheat.description} | {SEALED_LOCALLY[cheat.seal]} | {SEALED_ELSEWHERE[cheat.seal]} |"
        for cheat in TASK_CHEATS
    ]
    rows += [f"| `{cheat.name}` | {cheat.description} |" for cheat in REPLY_CHEATS]
    assert [row for row in rows if row not in lines] == []
    named = {line.split("`")[1] for line in lines if line.startswith("| `")}
    assert named - set(get_args(Result.__value__)) == {cheat.name for cheat in (*TASK_CHEATS, *REPLY_CHEATS)}


@pytest.mark.parametrize("cheat", TASK_CHEATS, ids=lambda cheat: cheat.name)
def test_each_script_is_one_that_a_shell_can_read(cheat: TaskCheat) -> None:
    result = subprocess.run(["bash", "-n"], input=PRELUDE + cheat.script, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_attacks_that_were_seen_have_a_cheat_each() -> None:
    names = {cheat.name for cheat in TASK_CHEATS}
    assert names >= {
        "early-reward", "reward-daemon", "tests-daemon", "shim-pytest", "shim-python", "shim-bash", "shim-git",
        "sitecustomize", "ld-preload", "tests-written-early", "outputs-linked-to-tests", "clock-set", "disk-filled",
        "conftest-dropped", "solution-read",
    }  # fmt: skip
    assert {cheat.name for cheat in REPLY_CHEATS} >= {
        "empty-answer", "prompt-repeated", "every-answer-at-once", "form-without-content", "huge-numbers",
        "boxed-twice", "forged-tool-results",
    }  # fmt: skip


def test_what_is_drawn_by_chance_follows_from_the_seed() -> None:
    def write_replies(seed: int) -> list[list[str]]:
        situation = Situation("What is 2 + 3?", (), "\\boxed{}", seed)
        return [list(cheat.replies(situation)) for cheat in REPLY_CHEATS]

    assert write_replies(0) == write_replies(0)
    assert write_replies(0) != write_replies(1)
