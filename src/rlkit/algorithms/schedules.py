"""Schedules: when groups are played, and when their gradients are computed.

Invariant: whatever depends on the schedule of a run asks its class, so that a new one is one class here and its line in
`SCHEDULES`. `rlkit.training.schedule` plays what a schedule allows.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rlkit._util.sections import NamedSection, Positive

type Streaming = Literal["each_group", "ready_groups"]
"""Division of gradients that are requested while groups are in play.

With `each_group`, every group is a request of its own, sent at once; given in the order of their draws, the requests
are the same whatever the timing. With `ready_groups`, the groups that are ready share a request as soon as the service
has answered the one before, since each request has a cost of its own.
"""


class Schedule(NamedSection):
    """A schedule; this one plays the groups of a step, and then trains on them.

    The first paragraph of a schedule's docstring is what the reference of the configuration says.
    """

    kind: ClassVar = "schedule"
    key: ClassVar = "mode"

    @property
    def steps_ahead(self) -> int:
        """Steps whose groups may be in play while an earlier one waits to be trained on; 0 is on-policy."""
        return 0

    @property
    def is_streaming(self) -> bool:
        """Whether gradients are computed before all groups of a step are there."""
        return False

    def streaming(self, *, is_repeatable: bool) -> Streaming | None:
        """Return how the gradients that are requested early are divided; None where none is.

        Args:
            is_repeatable: the service gives the same answers to the same requests.
        """
        return None

    def is_in_draw_order(self, *, is_repeatable: bool) -> bool:
        """Return whether a step takes the groups that were drawn first, and not those that were finished first."""
        return True

    def oldest_version(self, step: int) -> int:
        """Return the oldest weights that may have sampled a group, if it is trained on next.

        Args:
            step: the last one that is trained.
        """
        return step - self.steps_ahead


class Sync(Schedule):
    """Plays the groups of a step, and then trains on them."""

    name: ClassVar = "sync"


class Stream(Schedule):
    """Computes gradients as groups are finished. A service that repeats its answers bit for bit gets them in the order
    of the draws, so that a run can be repeated; any other gets them as groups finish.
    """

    name: ClassVar = "stream"

    @property
    def is_streaming(self) -> bool:  # noqa: D102  inherited
        return True

    def streaming(self, *, is_repeatable: bool) -> Streaming:
        """Return the division of gradients, which depends on timing only where the service does anyway.

        To a service that does not repeat its numbers, groups in the order of their draws would gain nothing, and a step
        would wait for its slowest group before it computes the gradients of the groups drawn later.
        """
        return "each_group" if is_repeatable else "ready_groups"

    def is_in_draw_order(self, *, is_repeatable: bool) -> bool:  # noqa: D102  inherited
        return is_repeatable


class Async(Schedule):
    """Plays the groups of later steps meanwhile, with weights that are some steps old."""

    name: ClassVar = "async"
    max_staleness: Positive = 1
    """Steps between the weights that a group starts with and those that it trains."""
    staleness: Literal["paced", "strict"] = "paced"
    """`strict` keeps to `max_staleness` and takes groups in the order in which they were started, so that a step waits
    for its slowest; `paced` keeps as many groups in play, and trains on a slow one when it is done."""

    @property
    def steps_ahead(self) -> int:  # noqa: D102  inherited
        return self.max_staleness

    def is_in_draw_order(self, *, is_repeatable: bool) -> bool:  # noqa: D102  inherited
        return self.staleness == "strict"

    def oldest_version(self, step: int) -> int:  # noqa: D102  inherited
        return 0 if self.staleness == "paced" else step - self.max_staleness


SCHEDULES: dict[str, type[Schedule]] = {schedule.name: schedule for schedule in (Sync, Stream, Async)}
