"""Schedules: the order of rollouts and gradients.

Invariant: everything that depends on the schedule is decided by its class, so a new schedule is a class and its entry
in `SCHEDULES`. `rlkit.training.schedule` starts the rollouts that a schedule allows.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rlkit._util.sections import NamedSection, Positive

type Streaming = Literal["each_group", "ready_groups"]
"""Requests for gradients while other groups are still running.

`each_group` sends a request for each group at once; in draw order, the requests do not depend on timing. `ready_groups`
sends all ready groups in a request as soon as the previous one is answered, because each request has a fixed cost.
"""


class Schedule(NamedSection):
    """The order of rollouts and training; by default, a step is trained once all its groups have finished.

    The first paragraph of a schedule's docstring is shown in the configuration reference.
    """

    kind: ClassVar = "schedule"
    key: ClassVar = "mode"
    is_streaming: ClassVar[bool] = False
    """True if gradients are computed before all groups of a step have finished."""

    @property
    def steps_ahead(self) -> int:
        """Number of steps that may run ahead of the next trained step; 0 is on-policy."""
        return 0

    def streaming(self, *, is_repeatable: bool) -> Streaming | None:
        """Return the division of early gradients into requests; None if no gradient is requested early.

        Args:
            is_repeatable: the service gives the same answers to the same requests.
        """
        return None

    def is_in_draw_order(self, *, is_repeatable: bool) -> bool:
        """Return whether a step takes groups in draw order, instead of in the order in which they finish."""
        return True

    def oldest_version(self, step: int) -> int:
        """Return the oldest version of the weights that may have sampled a group trained after `step`."""
        return step - self.steps_ahead


class Sync(Schedule):
    """Rollouts and training in turn: a step is trained once all its groups have finished."""

    name: ClassVar = "sync"


class Stream(Schedule):
    """Gradients while other groups are running. If the service repeats its answers bit for bit, groups are sent in draw
    order, so the run is reproducible. Otherwise groups are sent in the order in which they finish.
    """

    name: ClassVar = "stream"
    is_streaming: ClassVar = True

    def streaming(self, *, is_repeatable: bool) -> Streaming:  # noqa: D102  inherited
        # draw order delays groups behind a slow one, without any gain if the service's answers vary anyway
        return "each_group" if is_repeatable else "ready_groups"

    def is_in_draw_order(self, *, is_repeatable: bool) -> bool:  # noqa: D102  inherited
        return is_repeatable


class Async(Schedule):
    """Rollouts of later steps during training, with weights that are some steps old."""

    name: ClassVar = "async"
    max_staleness: Positive = 1
    """Number of steps that rollouts may start ahead of the step that is trained next."""
    staleness: Literal["paced", "strict"] = "paced"
    """`strict` trains groups in starting order, with weights at most `max_staleness` steps old, so a step waits for its
    slowest group. `paced` trains a slow group when it finishes. Both keep the same number of groups in flight."""

    @property
    def steps_ahead(self) -> int:  # noqa: D102  inherited
        return self.max_staleness

    def is_in_draw_order(self, *, is_repeatable: bool) -> bool:  # noqa: D102  inherited
        return self.staleness == "strict"

    def oldest_version(self, step: int) -> int:  # noqa: D102  inherited
        return 0 if self.staleness == "paced" else step - self.max_staleness


SCHEDULES: dict[str, type[Schedule]] = {schedule.name: schedule for schedule in (Sync, Stream, Async)}
