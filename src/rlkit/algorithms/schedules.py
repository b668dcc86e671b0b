"""Schedules: when groups are played, and when their gradients are computed.

Invariant: all that depends on the schedule of a run asks its class, so that a new one is one class and its line in
`SCHEDULES`. `rlkit.training.schedule` plays what a schedule allows.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rlkit._util.sections import NamedSection, Positive

type Streaming = Literal["each_group", "ready_groups"]
"""Division of the gradients that are requested while groups are in play.

With `each_group`, every group is a request of its own, sent at once; in the order of the draws, the requests are the
same whatever the timing. With `ready_groups`, the groups that are ready share a request as soon as the service has
answered the last one, since each request has a cost of its own.
"""


class Schedule(NamedSection):
    """The order of playing and training; by default, a step trains on its groups once all of them are played.

    The first paragraph of a schedule's docstring is the reference of the configuration.
    """

    kind: ClassVar = "schedule"
    key: ClassVar = "mode"

    @property
    def steps_ahead(self) -> int:
        """Number of steps that may be in play ahead of the one that is trained next; 0 is on-policy."""
        return 0

    @property
    def is_streaming(self) -> bool:
        """True if gradients are computed before all groups of a step are there."""
        return False

    def streaming(self, *, is_repeatable: bool) -> Streaming | None:
        """Return the division of the gradients that are requested early; None if none is.

        Args:
            is_repeatable: the service gives the same answers to the same requests.
        """
        return None

    def is_in_draw_order(self, *, is_repeatable: bool) -> bool:
        """Return whether a step takes the groups drawn first, instead of those finished first."""
        return True

    def oldest_version(self, step: int) -> int:
        """Return the oldest version of the weights that a group may be sampled with and trained on after `step`."""
        return step - self.steps_ahead


class Sync(Schedule):
    """Play and training in turn: a step trains once all of its groups are played."""

    name: ClassVar = "sync"


class Stream(Schedule):
    """Gradients while groups are in play. A service that repeats its answers bit for bit gets groups in the order of
    their draws, so that a run can be repeated; any other gets them as they finish.
    """

    name: ClassVar = "stream"

    @property
    def is_streaming(self) -> bool:  # noqa: D102  inherited
        return True

    def streaming(self, *, is_repeatable: bool) -> Streaming:
        """Return the division of gradients, which depends on timing only where the service does anyway.

        With a service that does not repeat its numbers, the order of the draws gains nothing, and a step would wait for
        a slow group before it computes the gradients of the groups drawn later.
        """
        return "each_group" if is_repeatable else "ready_groups"

    def is_in_draw_order(self, *, is_repeatable: bool) -> bool:  # noqa: D102  inherited
        return is_repeatable


class Async(Schedule):
    """Play of later steps during training, with weights that are some steps old."""

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
