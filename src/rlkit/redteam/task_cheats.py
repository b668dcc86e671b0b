"""Table of the cheats against Harbor tasks, ordered by target.

Invariant: each cheat has a unique name and one sentence, which the documentation's table repeats.
"""

from __future__ import annotations

from rlkit.redteam import cheats_on_outputs, cheats_on_programs, cheats_on_rewards, cheats_on_tests

TASK_CHEATS = (
    *cheats_on_rewards.CHEATS,
    *cheats_on_tests.CHEATS,
    *cheats_on_programs.CHEATS,
    *cheats_on_outputs.CHEATS,
)
