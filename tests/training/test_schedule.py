"""What is in play and which groups a step gets, on virtual time, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit._util.priority_semaphore import SlotsClosed
from rlkit.algorithms.datums import PlayedGroup, PreparedGroup
from rlkit.env import Task
from rlkit.errors import RolloutsFailed, RunFailed
from rlkit.testing import run_virtual
from rlkit.training.schedule import GroupSupply, SupplyLimits
from tests.builders import group

TRAINING_S = 3.0


class Plays:
    """Plays tasks that take the time, and teach, what a function of the draw says; counts who is in play."""

    def __init__(
        self,
        seconds: Callable[[int], float],
        *,
        teaches: Callable[[int], bool] = lambda draw: True,
        usable: Callable[[int], bool] = lambda draw: True,
        tasks: int = 10_000,
    ) -> None:
        self.seconds, self.teaches, self.usable, self.tasks = seconds, teaches, usable, tasks
        self.drawn = self.live = self.most_live = self.cancelled = 0
        self.version = 0
        self.began_with: dict[int, int] = {}

    def draw(self) -> Task | None:
        if self.drawn == self.tasks:
            return None
        self.drawn += 1
        return Task(self.drawn - 1, "env", object())  # type: ignore[arg-type]  never played

    async def play(self, task: Task) -> PlayedGroup:
        self.began_with[task.draw] = self.version
        self.live += 1
        self.most_live = max(self.live, self.most_live)
        try:
            await asyncio.sleep(self.seconds(task.draw))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.live -= 1
        usable = self.usable(task.draw)
        data = (object(),) if usable and self.teaches(task.draw) else ()
        return PlayedGroup(
            PreparedGroup(group([1.0] if usable else [None], draw=task.draw), [np.ones(1)], data), usable
        )  # type: ignore[arg-type]  only counted


def steps_of(pace: SupplyLimits, plays: Plays) -> list[list[tuple[int, bool]]]:
    """For each step, the draws that it got and whether they count."""

    async def run() -> list[list[tuple[int, bool]]]:
        supply, steps = GroupSupply(pace, draw=plays.draw, play=plays.play), list[list[tuple[int, bool]]]()
        supply.advance(0)
        for step in range(1, pace.steps + 1):
            got = list[tuple[int, bool]]()
            while (taken := await supply.next_group()) is not None:
                got.append((taken.played.prepared.group.draw, taken.is_trained))
            if not got:
                break
            steps.append(got)
            await asyncio.sleep(TRAINING_S)
            plays.version = step
            supply.advance(step)
        await supply.close()
        return steps

    return run_virtual(run())


durations = st.lists(st.floats(0.1, 50), min_size=1, max_size=20)


def paces(**fixed: object) -> st.SearchStrategy[SupplyLimits]:
    values = {
        "groups": st.integers(1, 4),
        "steps": st.integers(1, 6),
        "max_staleness": st.integers(0, 4),
        "in_order": st.booleans(),
    }
    return st.builds(SupplyLimits, **{**values, **{name: st.just(value) for name, value in fixed.items()}})  # type: ignore[arg-type]


@given(paces(), durations)
def test_every_group_that_is_started_is_in_exactly_one_step_and_every_step_is_full(
    pace: SupplyLimits, seconds: list[float]
) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)])
    steps = steps_of(pace, plays)
    drawn = [draw for step in steps for draw, _ in step]
    assert [len(step) for step in steps] == [pace.groups] * pace.steps
    assert sorted(drawn) == list(range(pace.groups * pace.steps))
    assert plays.drawn == len(drawn)  # nothing was thrown away
    assert plays.live == plays.cancelled == 0


@given(paces(in_order=True), durations)
def test_a_strict_step_trains_on_groups_at_most_max_staleness_steps_old_and_the_same_ones_whatever_the_timing(
    pace: SupplyLimits, seconds: list[float]
) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)])
    for number, step in enumerate(steps_of(pace, plays)):
        assert [draw for draw, _ in step] == list(range(number * pace.groups, (number + 1) * pace.groups))
        assert all(number - plays.began_with[draw] <= pace.max_staleness for draw, _ in step)


@given(paces(max_staleness=0), durations)
def test_without_staleness_every_group_begins_with_the_weights_that_it_trains(
    pace: SupplyLimits, seconds: list[float]
) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)])
    for number, step in enumerate(steps_of(pace, plays)):
        assert all(plays.began_with[draw] == number for draw, _ in step)


@given(paces(), durations)
def test_no_more_is_in_play_than_the_steps_ahead_can_use(pace: SupplyLimits, seconds: list[float]) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)])
    steps_of(pace, plays)
    ahead = pace.max_staleness + 1
    assert plays.most_live <= pace.groups * min(ahead, pace.steps)


@given(paces(replace=True, max_replaced_groups=1000), durations, st.integers(2, 4))
def test_groups_that_teach_nothing_are_replaced_until_the_step_is_full(
    pace: SupplyLimits, seconds: list[float], every: int
) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)], teaches=lambda draw: draw % every == 0)
    steps = steps_of(pace, plays)
    assert [sum(counts for _, counts in step) for step in steps] == [pace.groups] * pace.steps
    assert all(counts == (draw % every == 0) for step in steps for draw, counts in step)


@given(paces(replace=True), durations, st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 4))
def test_with_a_limit_to_what_is_replaced_nothing_is_started_that_no_step_uses_and_nothing_is_older_than_it_may_be(
    pace: SupplyLimits, seconds: list[float], teaches: list[bool], most: int
) -> None:
    pace = replace(pace, max_replaced_groups=most)
    plays = Plays(lambda draw: seconds[draw % len(seconds)], teaches=lambda draw: teaches[draw % len(teaches)])
    steps = steps_of(pace, plays)
    assert [sum(counts for _, counts in step) for step in steps] == [pace.groups] * pace.steps
    assert plays.drawn == sum(len(step) for step in steps)
    assert plays.cancelled == 0
    if pace.in_order or not pace.max_staleness:
        ages = [number - plays.began_with[draw] for number, step in enumerate(steps) for draw, _ in step]
        assert max(ages) <= pace.max_staleness


def test_past_the_limit_a_group_that_teaches_nothing_counts() -> None:
    pace = SupplyLimits(2, 3, replace=True, max_replaced_groups=3)
    steps = steps_of(pace, Plays(lambda draw: 1.0, teaches=lambda draw: False))
    assert [[counts for _, counts in step] for step in steps] == [[False] * 3 + [True] * 2] * 3


def test_a_group_of_no_use_is_replaced_but_not_for_ever() -> None:
    steps = steps_of(SupplyLimits(2, 2), Plays(lambda draw: 1.0, usable=lambda draw: draw % 3 != 0))
    assert [sum(counts for _, counts in step) for step in steps] == [2, 2]
    with pytest.raises(RunFailed, match="4 groups in a row had too many failed rollouts; the last: boom"):
        steps_of(SupplyLimits(2, 2), Plays(lambda draw: 1.0, usable=lambda draw: draw < 3))


def test_no_more_is_started_where_what_is_ready_will_end_the_run() -> None:
    async def run() -> int:
        plays = Plays(lambda draw: 1.0, usable=lambda draw: False)
        supply = GroupSupply(SupplyLimits(2, 9, 3), draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(1000)  # nobody asks for groups meanwhile
        await supply.close()
        return plays.drawn

    assert run_virtual(run()) <= 16


def test_a_paced_step_does_not_wait_for_a_slow_group_and_a_strict_one_does() -> None:
    slow = {0: 1000.0}
    paced = steps_of(SupplyLimits(2, 4, 1, in_order=False), Plays(lambda draw: slow.get(draw, 1.0)))
    assert 0 in [draw for draw, _ in paced[-1]]
    strict = steps_of(SupplyLimits(2, 4, 1), Plays(lambda draw: slow.get(draw, 1.0)))
    assert strict[0][0][0] == 0


def test_tasks_that_run_out_leave_a_short_last_step() -> None:
    steps = steps_of(SupplyLimits(2, 9), Plays(lambda draw: 1.0, tasks=5))
    assert [len(step) for step in steps] == [2, 2, 1]


def test_what_playing_raises_is_raised_to_whoever_waits() -> None:
    async def broken(task: Task) -> PlayedGroup:
        raise ZeroDivisionError("in play")

    async def run() -> None:
        supply = GroupSupply(SupplyLimits(2, 2), draw=Plays(lambda draw: 1.0).draw, play=broken)
        supply.advance(0)
        with pytest.raises(ZeroDivisionError, match="in play"):
            await supply.next_group()
        await supply.close()

    run_virtual(run())


def test_a_group_that_somebody_else_cancels_ends_the_run() -> None:
    plays = Plays(lambda draw: 1e6)

    async def run() -> None:
        supply = GroupSupply(SupplyLimits(3, 2), draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(1)
        next(task for task in asyncio.all_tasks() if task.get_name() == "group 1").cancel()
        with pytest.raises(RunFailed, match="cancels asyncio tasks that it did not start"):
            await supply.next_group()
        await supply.close()

    run_virtual(run())
    assert (plays.live, plays.cancelled) == (0, 3)


def test_closing_stops_what_is_in_play() -> None:
    plays = Plays(lambda draw: 1e6)

    async def run() -> None:
        supply = GroupSupply(SupplyLimits(3, 2), draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(1)
        await supply.close()

    run_virtual(run())
    assert (plays.live, plays.cancelled) == (0, 3)


def test_a_source_of_tasks_that_breaks_is_told_to_whoever_waits() -> None:
    def broken() -> Task | None:
        raise ZeroDivisionError("no tasks")

    async def run() -> None:
        supply = GroupSupply(SupplyLimits(2, 2), draw=broken, play=Plays(lambda draw: 1.0).play)
        supply.advance(0)
        with pytest.raises(ZeroDivisionError, match="no tasks"):
            await supply.next_group()
        await supply.close()

    run_virtual(run())


@pytest.mark.parametrize(("in_order", "draws"), [(True, [0]), (False, [0, 2])])
def test_a_supply_whose_slots_close_finishes_what_is_played_and_starts_nothing_more(
    in_order: bool, draws: list[int]
) -> None:
    async def run() -> None:
        plays = Plays(lambda draw: 1.0 if draw == 0 else 5.0)

        async def play(task: Task) -> PlayedGroup:
            if task.draw == 1:
                await asyncio.sleep(2)
                raise SlotsClosed("the budget is used up")
            return await plays.play(task)

        supply = GroupSupply(SupplyLimits(3, 2, in_order=in_order), draw=plays.draw, play=play)
        supply.advance(0)
        groups = list[int]()
        while (group := await supply.next_group()) is not None:
            groups.append(group.played.prepared.group.draw)
        assert groups == draws, "a step takes no group before one that was drawn earlier"
        assert supply.is_cut
        supply.advance(1)
        assert (plays.drawn, plays.live) == (3, 0)

    run_virtual(run())


def test_a_supply_that_is_closed_starts_nothing() -> None:
    async def run() -> None:
        plays = Plays(lambda draw: 1e6)
        supply = GroupSupply(SupplyLimits(2, 9, 1), draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(1)
        await supply.close()
        drawn = plays.drawn
        supply.advance(5)
        await asyncio.sleep(1)
        assert (plays.drawn, plays.live) == (drawn, 0)

    run_virtual(run())


@pytest.mark.parametrize(("groups", "most"), [(1, 4), (2, 4), (3, 6)])
def test_so_many_groups_in_a_row_end_a_run_and_one_that_is_of_use_begins_the_count_anew(groups: int, most: int) -> None:
    async def run() -> list[bool]:
        plays = Plays(lambda draw: 1.0, usable=lambda draw: draw == 3)
        supply, taken = GroupSupply(SupplyLimits(groups, 9, 9), draw=plays.draw, play=plays.play), list[bool]()
        supply.advance(0)
        with pytest.raises(RolloutsFailed, match=f"^{most} groups in a row"):
            while len(taken) < 99:
                one = await supply.next_group()
                taken += [] if one is None else [one.is_trained]
        await supply.close()
        return taken

    assert run_virtual(run()) == [False] * 3 + [True] + [False] * (most - 1)


def test_tasks_that_were_drawn_before_are_played_first_and_steps_that_were_trained_are_not_made_again() -> None:
    async def run() -> None:
        plays = Plays(lambda draw: 1.0)
        plays.drawn = 10
        waiting = [Task(draw, "env", object()) for draw in (4, 7)]  # type: ignore[arg-type]  never played
        supply = GroupSupply(SupplyLimits(3, 5), draw=plays.draw, play=plays.play, trained_step=4, waiting=waiting)
        supply.advance(4)
        draws = list[int]()
        while (one := await supply.next_group()) is not None:
            draws.append(one.played.prepared.group.draw)
        supply.advance(5)
        await asyncio.sleep(10)
        assert (draws, plays.drawn, plays.live) == ([4, 7, 10], 11, 0)  # the run has no sixth step
        await supply.close()

    run_virtual(run())


def test_the_tokens_that_no_step_has_got_are_those_of_groups_that_can_be_trained_on() -> None:
    class Sized:
        targets = range(5)

    async def run() -> None:
        plays = Plays(lambda draw: 1.0, usable=lambda draw: draw != 1)

        async def play(task: Task) -> PlayedGroup:
            played = await plays.play(task)
            return replace(played, prepared=replace(played.prepared, data=(Sized(),)))  # type: ignore[arg-type]  only counted

        supply = GroupSupply(SupplyLimits(3, 1), draw=plays.draw, play=play)
        assert supply.untrained_tokens == 0
        supply.advance(0)
        await asyncio.sleep(10)
        assert supply.untrained_tokens == 3 * 5  # another one is played in the place of the one that failed
        await supply.next_group()
        assert supply.untrained_tokens == 2 * 5
        await supply.close()

    run_virtual(run())


def test_the_next_step_is_begun_while_the_weights_of_this_one_are_made() -> None:
    async def run() -> None:
        plays = Plays(lambda draw: 1.0)
        supply = GroupSupply(SupplyLimits(1, 9, 1), draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(5)
        assert plays.drawn == 2  # as many steps ahead as staleness allows, and no more
        assert await supply.next_group() is not None
        assert await supply.next_group() is None
        await asyncio.sleep(5)
        assert plays.drawn == 2
        supply.advance(1)
        await asyncio.sleep(5)
        assert plays.drawn == 3
        await supply.close()

    run_virtual(run())


def test_another_group_is_begun_for_one_that_teaches_nothing_before_the_step_asks_for_it() -> None:
    async def drawn(pace: SupplyLimits) -> int:
        plays = Plays(lambda draw: 1.0, teaches=lambda draw: draw >= 2)
        supply = GroupSupply(pace, draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(10)  # nobody asks for groups meanwhile
        await supply.close()
        return plays.drawn

    assert run_virtual(drawn(SupplyLimits(2, 9, replace=True, max_replaced_groups=5))) == 4
    assert run_virtual(drawn(SupplyLimits(2, 9, replace=True, max_replaced_groups=1))) == 3
    assert run_virtual(drawn(SupplyLimits(2, 9))) == 2
