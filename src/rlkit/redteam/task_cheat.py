"""Cheat against a Harbor task: a name, a description and a shell script.

Invariant: a script uses only facts that an agent can know: the paths in the instruction (`OUTPUTS`) and, from earlier
episodes, the names of the tests' files (`TESTS`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import Literal, cast

type Seal = Literal["view", "record", "programs", "tests", "kernel"]
"""Defence against a cheat: the verifier's view, rlkit's copy of the agent's record, the programs of the image, the
tests, or blocked system calls."""

SKIP_EXIT_CODE = 77
"""Exit code of a script that cannot run here; the last line of its output is the reason."""

PRELUDE = r"""
set -eu
PAY='{ echo "{\"reward\": 1.0}" > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt; } 2>/dev/null'
PAY_IN_PYTHON='def pay(*roots):
    for root in roots:
        for name, text in (("reward.json", "{\"reward\": 1.0}"), ("reward.txt", "1")):
            try:
                with open(f"{root}/logs/verifier/{name}", "w") as file:
                    file.write(text)
            except OSError:
                pass'
HIDE=/tmp/.cheat
mkdir -p $HIDE
export HOME="${HOME:-/root}"
skip() { echo "$*"; exit 77; }
need() { command -v "$1" > /dev/null || skip "the environment has no $1"; }
forever() { setsid nohup bash -c "while :; do $1; sleep 0.01; done" > /dev/null 2>&1 < /dev/null & }
with_pay() { printf '%s\n' "$PAY_IN_PYTHON"; cat; }
leave() { setsid nohup "$@" > /dev/null 2>&1 < /dev/null & }
shim() { { echo "#!${2:-/bin/sh}"; echo "$PAY"; echo 'exit 0'; } > "$1" && chmod 755 "$1"; }
writable() { touch "$1/.cheat" 2> /dev/null && rm "$1/.cheat" || skip "$1 is not writable"; }
"""
"""Shell functions for all scripts.

`PAY` is a command that writes both reward files. `forever` starts a daemon that repeats a command, `leave` starts a
program as a daemon. `shim` writes a program that runs `PAY` and succeeds. `with_pay` copies a Python program, after a
function `pay` that writes both reward files below each of some root folders, "" for its own.
"""


@dataclass(frozen=True)
class TaskCheat:
    """Way to earn a reward without the solution: bash commands, run as the agent's user in each step of a task.

    The script may use the functions of `PRELUDE`.
    """

    name: str
    description: str
    script: str
    seal: Seal = "view"


_HEADER = re.compile(r"^# ([a-z-]+)(?: \[([a-z]+)\])?: (.+)\n", re.MULTILINE)


def read_cheats(text: str, *, functions: str) -> Sequence[TaskCheat]:
    """Return the cheats of a text: for each a line `# name [seal]: description`, and its script.

    The seal `view` is left out.

    Args:
        functions: shell functions for all scripts of the text.
    """
    cheats = batched(_HEADER.split(text)[1:], 4)
    return [
        TaskCheat(name, description, functions + script, seal=cast("Seal", seal or "view"))
        for name, seal, description, script in cheats
    ]
