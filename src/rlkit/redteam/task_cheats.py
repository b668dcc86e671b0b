"""The red team's cheats against tasks of Harbor's, by what they attack.

Invariant: each has a name of its own and one sentence; the documentation's table is made of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlkit.redteam import cheats_on_outputs, cheats_on_programs, cheats_on_rewards, cheats_on_tests
from rlkit.redteam.task_cheat import TaskCheat

GROUPS: Mapping[str, Sequence[TaskCheat]] = {
    "the verdict": cheats_on_rewards.CHEATS,
    "the tests": cheats_on_tests.CHEATS,
    "the programs of the tests": cheats_on_programs.CHEATS,
    "the outputs": cheats_on_outputs.CHEATS,
}

TASK_CHEATS = tuple(replace(cheat, attacks=group) for group, cheats in GROUPS.items() for cheat in cheats)
