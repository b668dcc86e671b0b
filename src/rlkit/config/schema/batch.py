"""The sections of the groups of a step, and of the order in which they are played and trained on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlkit._util.sections import Positive, Section, SectionTable
from rlkit.algorithms.schedules import SCHEDULES, Schedule

type ScheduleConfig = Annotated[Schedule, SectionTable(SCHEDULES, default="sync")]


class BatchConfig(Section):
    """Groups of a step, and their conversion to training sequences."""

    groups: Positive = 16
    """Number of groups in a step; each group plays one task."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts per task. Eight are enough to estimate the group's mean reward, which is the baseline."""
    substeps: Positive = 1
    """Optimiser steps per step, each on an equal share of the groups. More than one is off-policy."""
    replace_uninformative: bool = False
    """Replace a group with equal rewards by another group, so that every step learns from `groups` groups."""
    max_replaced_groups: Positive | None = None
    """Maximum number of replaced groups in a step; a step that needs more has fewer groups. Null for four times
    `groups`."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Maximum length of a training sequence in tokens; null for no limit."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """Treatment of a sequence longer than `max_tokens`: train on its beginning, drop it, or end the run."""
    normalize: Literal["none", "token", "sequence", "constant"] = "none"
    """Divisor of a token's advantage. `none`: 1, so the loss is a sum over tokens, as in the Tinker service; Adam is
    invariant to its scale. `token`: sampled tokens of the group. `sequence`: sampled tokens of the episode × episodes
    of the group. `constant`: `normalize_tokens` × episodes of the group. The last three also divide by the number of
    groups of an optimiser step, so the loss is a mean over groups."""
    normalize_tokens: Positive | None = None
    """With `normalize: constant`: constant number of tokens per episode; null for `sampling.max_tokens`."""
    clip_advantages: Annotated[float, Field(gt=0)] | None = None
    """Maximum absolute advantage; larger advantages are clipped. Null for no limit, because a fixed range of rewards
    already bounds advantages."""

    def _check_section(self) -> None:
        if self.groups % self.substeps:
            raise ValueError(f"substeps: {self.groups} groups cannot be split equally into {self.substeps} substeps")
        if not self.replace_uninformative:
            self.refuse_unused("max_replaced_groups", fix="set replace_uninformative to true")
        if self.max_tokens is None:
            self.refuse_unused("overlong", fix="set max_tokens")
        if self.normalize != "constant":
            self.refuse_unused("normalize_tokens", fix="set normalize to constant")

    @property
    def replaced_groups_limit(self) -> int:
        """Maximum number of replaced groups in a step; 0 if no group is replaced."""
        limit = self.max_replaced_groups or 4 * self.groups
        return limit if self.replace_uninformative else 0
