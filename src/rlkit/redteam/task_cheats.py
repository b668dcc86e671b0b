"""The red team's cheats against tasks of Harbor's, in the order of what they attack.

Invariant: each has a name of its own and one sentence; the documentation's table is made of these.
"""

from __future__ import annotations

from rlkit.redteam import cheats_on_outputs, cheats_on_programs, cheats_on_rewards, cheats_on_tests

TASK_CHEATS = (
    *cheats_on_rewards.CHEATS,
    *cheats_on_tests.CHEATS,
    *cheats_on_programs.CHEATS,
    *cheats_on_outputs.CHEATS,
)
