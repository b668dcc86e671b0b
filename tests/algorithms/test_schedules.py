"""What each schedule allows, as the parts of a run that ask it see it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rlkit.algorithms.schedules import SCHEDULES, Async, Schedule, Stream, Sync

ALL = [Sync(), Stream(), Async(), Async(max_staleness=4), Async(max_staleness=2, staleness="strict")]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
@pytest.mark.parametrize("is_repeatable", [False, True])
def test_gradients_are_divided_only_where_they_are_requested_early(schedule: Schedule, is_repeatable: bool) -> None:
    assert (schedule.streaming(is_repeatable=is_repeatable) is not None) == schedule.is_streaming


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_a_service_that_repeats_its_answers_gets_groups_in_an_order_that_timing_cannot_change(
    schedule: Schedule,
) -> None:
    paced = isinstance(schedule, Async) and schedule.staleness == "paced"
    assert schedule.is_in_draw_order(is_repeatable=True) != paced


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_weights_that_may_have_sampled_a_group_are_never_newer_than_the_last_step(schedule: Schedule) -> None:
    assert schedule.oldest_version(10) <= 10 - schedule.steps_ahead
    assert schedule.oldest_version(10) == 10 - schedule.steps_ahead or not schedule.is_in_draw_order(is_repeatable=True)


def test_schedules_are_known_by_name_and_have_only_their_own_settings() -> None:
    assert {name: cls.name for name, cls in SCHEDULES.items()} == {name: name for name in SCHEDULES}
    assert Async(max_staleness=2).model_dump() == {"mode": "async", "max_staleness": 2, "staleness": "paced"}
    assert Sync().model_dump() == {"mode": "sync"}
    with pytest.raises(ValidationError):
        Sync.model_validate({"max_staleness": 1})
