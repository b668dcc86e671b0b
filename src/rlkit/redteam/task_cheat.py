"""One cheat against a task of Harbor's: a name, a sentence and a shell script.

Invariant: a script asks nothing of the task it attacks but what an agent there could know: the paths that the
instruction names (`OUTPUTS`) and, from earlier episodes, the names of the files of the tests (`TESTS`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

type Seal = Literal["view", "record", "programs", "tests", "kernel"]
"""The defence against a cheat: the verifier's view, rlkit's copy of the agent's record, the programs of the image, the
tests themselves, or system calls that are refused."""

SKIPPED = 77
"""Exit code of a script that cannot be carried out here; the last line of its output is the reason."""

PRELUDE = r"""
set -eu
PAY='{ echo "{\"reward\": 1.0}" > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt; } 2>/dev/null'
HIDE=/tmp/.cheat
mkdir -p $HIDE
export HOME="${HOME:-/root}"
skip() { echo "$*"; exit 77; }
need() { command -v "$1" > /dev/null || skip "the environment has no $1"; }
forever() { setsid nohup bash -c "while :; do $1; sleep 0.01; done" > /dev/null 2>&1 < /dev/null & }
leave() { setsid nohup "$@" > /dev/null 2>&1 < /dev/null & }
shim() { { echo "#!${2:-/bin/sh}"; echo "$PAY"; echo 'exit 0'; } > "$1" && chmod 755 "$1"; }
writable() { touch "$1/.cheat" 2> /dev/null && rm "$1/.cheat" || skip "$1 cannot be written to"; }
"""
"""Functions that the scripts share.

`PAY` is a command that writes both files of a reward. `forever` leaves a daemon with a loop around a command, `leave`
one with a program. `shim` writes a program that pays and succeeds.
"""


@dataclass(frozen=True)
class TaskCheat:
    """One way to earn a reward without solving a task.

    Args:
        script: commands for bash, run as the agent's user in the agent's environment, before verification. In a task of
            steps they are run in each step.
    """

    name: str
    does: str
    script: str
    seal: Seal = "view"

    @property
    def command(self) -> str:
        """The whole script."""
        return PRELUDE + self.script
