"""Running groups and the groups of each step, on virtual time, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit._util.priority_semaphore import SlotsClosed
from rlkit.algorithms.datums import PreparedGroup
from rlkit.env import Task
from rlkit.errors import RolloutsFailed, RunFailed
from rlkit.testing import run_virtual
from rlkit.training.schedule import GroupSupply, SupplyLimits
from tests.builders import group

TRAINING_S = 3.0


class Plays:
    """Play tasks whose duration and signal are functions of the draw, and count the running groups."""

    def __init__(
        self,
        seconds: Callable[[int], float],
        *,
        teaches: Callable[[int], bool] = lambda draw: True,
        usable: Callable[[int], bool] = lambda draw: True,
        tasks: int = 10_000,
    ) -> None:
        self.seconds, self.teaches, self.usable, self.tasks = seconds, teaches, usable, tasks
        self.draw_count = self.live = self.most_live = self.cancelled = 0
        self.version = 0
        self.began_with: dict[int, int] = {}

    def draw(self) -> Task | None:
        if self.draw_count == self.tasks:
            return None
        self.draw_count += 1
        return Task(self.draw_count - 1, "env", object())  # type: ignore[arg-type]  never played

    async def play(self, task: Task) -> PreparedGroup:
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
        played = group([1.0] if usable else [None], draw=task.draw)
        return PreparedGroup(played, [np.ones(1)], data, is_usable=usable)  # type: ignore[arg-type]  only counted


def collect_steps(pace: SupplyLimits, plays: Plays) -> list[list[tuple[int, bool]]]:
    """Return the draws of each step, each with a flag that says if the step trains on it."""

    async def run() -> list[list[tuple[int, bool]]]:
        supply, steps = GroupSupply(pace, draw=plays.draw, play=plays.play), list[list[tuple[int, bool]]]()
        supply.advance(0)
        for step in range(1, pace.steps + 1):
            groups = list[tuple[int, bool]]()
            while (item := await supply.next_group()) is not None:
                groups.append((item.prepared.group.draw, item.is_trained))
            if not groups:
                break
            steps.append(groups)
            await asyncio.sleep(TRAINING_S)
            plays.version = step
            supply.advance(step)
        await supply.close()
        return steps

    return run_virtual(run())


durations = st.lists(st.floats(0.1, 50), min_size=1, max_size=20)


def make_paces(**fixed: object) -> st.SearchStrategy[SupplyLimits]:
    values = {
        "groups": st.integers(1, 4),
        "steps": st.integers(1, 6),
        "max_staleness": st.integers(0, 4),
        "in_order": st.booleans(),
    }
    return st.builds(SupplyLimits, **{**values, **{name: st.just(value) for name, value in fixed.items()}})  # type: ignore[arg-type]


@given(make_paces(), durations)
def test_each_group_is_in_one_step_and_each_step_is_full(pace: SupplyLimits, seconds: list[float]) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)])
    steps = collect_steps(pace, plays)
    draws = [draw for step in steps for draw, _ in step]
    assert [len(step) for step in steps] == [pace.groups] * pace.steps
    assert sorted(draws) == list(range(pace.groups * pace.steps))
    assert plays.draw_count == len(draws)  # nothing was thrown away
    assert plays.live == plays.cancelled == 0


@given(make_paces(in_order=True), durations)
def test_strict_steps_bound_staleness_and_ignore_timing(pace: SupplyLimits, seconds: list[float]) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)])
    for number, step in enumerate(collect_steps(pace, plays)):
        assert [draw for draw, _ in step] == list(range(number * pace.groups, (number + 1) * pace.groups))
        assert all(number - plays.began_with[draw] <= pace.max_staleness for draw, _ in step)


@given(make_paces(max_staleness=0), durations)
def test_groups_without_staleness_are_on_policy(pace: SupplyLimits, seconds: list[float]) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)])
    for number, step in enumerate(collect_steps(pace, plays)):
        assert all(plays.began_with[draw] == number for draw, _ in step)


@given(make_paces(), durations)
def test_running_groups_do_not_exceed_the_steps_ahead(pace: SupplyLimits, seconds: list[float]) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)])
    collect_steps(pace, plays)
    ahead = pace.max_staleness + 1
    assert plays.most_live <= pace.groups * min(ahead, pace.steps)


@given(make_paces(max_replaced_groups=1000), durations, st.integers(2, 4))
def test_uninformative_groups_are_replaced_until_the_step_is_full(
    pace: SupplyLimits, seconds: list[float], every: int
) -> None:
    plays = Plays(lambda draw: seconds[draw % len(seconds)], teaches=lambda draw: draw % every == 0)
    steps = collect_steps(pace, plays)
    assert [sum(counts for _, counts in step) for step in steps] == [pace.groups] * pace.steps
    assert all(counts == (draw % every == 0) for step in steps for draw, counts in step)


@given(make_paces(), durations, st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 4))
def test_limited_replacement_uses_every_group_and_bounds_staleness(
    pace: SupplyLimits, seconds: list[float], teaches: list[bool], max_replaced: int
) -> None:
    pace = replace(pace, max_replaced_groups=max_replaced)
    plays = Plays(lambda draw: seconds[draw % len(seconds)], teaches=lambda draw: teaches[draw % len(teaches)])
    steps = collect_steps(pace, plays)
    assert [sum(counts for _, counts in step) for step in steps] == [pace.groups] * pace.steps
    assert plays.draw_count == sum(len(step) for step in steps)
    assert plays.cancelled == 0
    if pace.in_order or not pace.max_staleness:
        ages = [number - plays.began_with[draw] for number, step in enumerate(steps) for draw, _ in step]
        assert max(ages) <= pace.max_staleness


def test_uninformative_group_past_the_limit_is_trained_on() -> None:
    pace = SupplyLimits(2, 3, max_replaced_groups=3)
    steps = collect_steps(pace, Plays(lambda draw: 1.0, teaches=lambda draw: False))
    assert [[counts for _, counts in step] for step in steps] == [[False] * 3 + [True] * 2] * 3


def test_unusable_groups_are_replaced_up_to_a_limit() -> None:
    steps = collect_steps(SupplyLimits(2, 2), Plays(lambda draw: 1.0, usable=lambda draw: draw % 3 != 0))
    assert [sum(counts for _, counts in step) for step in steps] == [2, 2]
    with pytest.raises(RunFailed, match="4 groups in a row had too many failed rollouts; the last: boom"):
        collect_steps(SupplyLimits(2, 2), Plays(lambda draw: 1.0, usable=lambda draw: draw < 3))


def test_no_group_starts_if_the_ready_groups_complete_the_run() -> None:
    async def run() -> int:
        plays = Plays(lambda draw: 1.0, usable=lambda draw: False)
        supply = GroupSupply(SupplyLimits(2, 9, 3), draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(1000)  # nobody asks for groups meanwhile
        await supply.close()
        return plays.draw_count

    assert run_virtual(run()) <= 16


def test_a_paced_step_does_not_wait_for_a_slow_group_and_a_strict_one_does() -> None:
    slow = {0: 1000.0}
    paced = collect_steps(SupplyLimits(2, 4, 1, in_order=False), Plays(lambda draw: slow.get(draw, 1.0)))
    assert 0 in [draw for draw, _ in paced[-1]]
    strict = collect_steps(SupplyLimits(2, 4, 1), Plays(lambda draw: slow.get(draw, 1.0)))
    assert strict[0][0][0] == 0


def test_tasks_that_run_out_leave_a_short_last_step() -> None:
    steps = collect_steps(SupplyLimits(2, 9), Plays(lambda draw: 1.0, tasks=5))
    assert [len(step) for step in steps] == [2, 2, 1]


def test_error_of_a_group_is_raised_to_the_waiting_step() -> None:
    async def broken(task: Task) -> PreparedGroup:
        raise ZeroDivisionError("in play")

    async def run() -> None:
        supply = GroupSupply(SupplyLimits(2, 2), draw=Plays(lambda draw: 1.0).draw, play=broken)
        supply.advance(0)
        with pytest.raises(ZeroDivisionError, match="in play"):
            await supply.next_group()
        await supply.close()

    run_virtual(run())


def test_cancelled_group_ends_the_run() -> None:
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


def test_closing_cancels_running_groups() -> None:
    plays = Plays(lambda draw: 1e6)

    async def run() -> None:
        supply = GroupSupply(SupplyLimits(3, 2), draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(1)
        await supply.close()

    run_virtual(run())
    assert (plays.live, plays.cancelled) == (0, 3)


def test_error_of_a_task_source_is_raised_to_the_waiting_step() -> None:
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
def test_supply_with_closed_slots_finishes_running_groups_only(in_order: bool, draws: list[int]) -> None:
    async def run() -> None:
        plays = Plays(lambda draw: 1.0 if draw == 0 else 5.0)

        async def play(task: Task) -> PreparedGroup:
            if task.draw == 1:
                await asyncio.sleep(2)
                raise SlotsClosed("the budget is used up")
            return await plays.play(task)

        supply = GroupSupply(SupplyLimits(3, 2, in_order=in_order), draw=plays.draw, play=play)
        supply.advance(0)
        groups = list[int]()
        while (group := await supply.next_group()) is not None:
            groups.append(group.prepared.group.draw)
        assert groups == draws, "a step takes no group before one that was drawn earlier"
        assert supply.is_cut
        supply.advance(1)
        assert (plays.draw_count, plays.live) == (3, 0)

    run_virtual(run())


def test_closed_supply_starts_no_group() -> None:
    async def run() -> None:
        plays = Plays(lambda draw: 1e6)
        supply = GroupSupply(SupplyLimits(2, 9, 1), draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(1)
        await supply.close()
        draw_count = plays.draw_count
        supply.advance(5)
        await asyncio.sleep(1)
        assert (plays.draw_count, plays.live) == (draw_count, 0)

    run_virtual(run())


@pytest.mark.parametrize(("groups", "max_failures"), [(1, 4), (2, 4), (3, 6)])
def test_consecutive_unusable_groups_end_the_run_and_a_usable_one_resets_the_count(
    groups: int, max_failures: int
) -> None:
    async def run() -> list[bool]:
        plays = Plays(lambda draw: 1.0, usable=lambda draw: draw == 3)
        supply, is_trained = GroupSupply(SupplyLimits(groups, 9, 9), draw=plays.draw, play=plays.play), list[bool]()
        supply.advance(0)
        with pytest.raises(RolloutsFailed, match=f"^{max_failures} groups in a row"):
            while len(is_trained) < 99:
                item = await supply.next_group()
                is_trained += [] if item is None else [item.is_trained]
        await supply.close()
        return is_trained

    assert run_virtual(run()) == [False] * 3 + [True] + [False] * (max_failures - 1)


def test_outstanding_tasks_are_played_first_after_a_resumption() -> None:
    async def run() -> None:
        plays = Plays(lambda draw: 1.0)
        plays.draw_count = 10
        waiting = [Task(draw, "env", object()) for draw in (4, 7)]  # type: ignore[arg-type]  never played
        supply = GroupSupply(SupplyLimits(3, 5), draw=plays.draw, play=plays.play, trained_step=4, waiting=waiting)
        supply.advance(4)
        draws = list[int]()
        while (item := await supply.next_group()) is not None:
            draws.append(item.prepared.group.draw)
        supply.advance(5)
        await asyncio.sleep(10)
        assert (draws, plays.draw_count, plays.live) == ([4, 7, 10], 11, 0)  # the run has no sixth step
        await supply.close()

    run_virtual(run())


def test_waiting_tokens_count_trainable_groups_only() -> None:
    class Sized:
        targets = range(5)

    async def run() -> None:
        plays = Plays(lambda draw: 1.0, usable=lambda draw: draw != 1)

        async def play(task: Task) -> PreparedGroup:
            return replace(await plays.play(task), data=(Sized(),))  # type: ignore[arg-type]  only counted

        supply = GroupSupply(SupplyLimits(3, 1), draw=plays.draw, play=play)
        assert supply.untrained_tokens == 0
        supply.advance(0)
        await asyncio.sleep(10)
        assert supply.untrained_tokens == 3 * 5  # another one is played in the place of the one that failed
        await supply.next_group()
        assert supply.untrained_tokens == 2 * 5
        await supply.close()

    run_virtual(run())


def test_next_step_starts_while_the_weights_are_updated() -> None:
    async def run() -> None:
        plays = Plays(lambda draw: 1.0)
        supply = GroupSupply(SupplyLimits(1, 9, 1), draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(5)
        assert plays.draw_count == 2  # as many steps ahead as staleness allows, and no more
        assert await supply.next_group() is not None
        assert await supply.next_group() is None
        await asyncio.sleep(5)
        assert plays.draw_count == 2
        supply.advance(1)
        await asyncio.sleep(5)
        assert plays.draw_count == 3
        await supply.close()

    run_virtual(run())


def test_replacement_of_an_uninformative_group_starts_at_once() -> None:
    async def count_draws(pace: SupplyLimits) -> int:
        plays = Plays(lambda draw: 1.0, teaches=lambda draw: draw >= 2)
        supply = GroupSupply(pace, draw=plays.draw, play=plays.play)
        supply.advance(0)
        await asyncio.sleep(10)  # nobody asks for groups meanwhile
        await supply.close()
        return plays.draw_count

    assert run_virtual(count_draws(SupplyLimits(2, 9, max_replaced_groups=5))) == 4
    assert run_virtual(count_draws(SupplyLimits(2, 9, max_replaced_groups=1))) == 3
    assert run_virtual(count_draws(SupplyLimits(2, 9))) == 2
