"""Limits and orders that each schedule gives to the parts of a run."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rlkit.algorithms.schedules import SCHEDULES, Async, Schedule, Stream, Sync

ALL = [Sync(), Stream(), Async(), Async(max_staleness=4), Async(max_staleness=2, staleness="strict")]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
@pytest.mark.parametrize("is_repeatable", [False, True])
def test_only_streaming_schedules_divide_gradients(schedule: Schedule, is_repeatable: bool) -> None:
    assert (schedule.streaming(is_repeatable=is_repeatable) is not None) == schedule.is_streaming


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_order_of_groups_is_deterministic_for_a_repeatable_service(
    schedule: Schedule,
) -> None:
    paced = isinstance(schedule, Async) and schedule.staleness == "paced"
    assert schedule.is_in_draw_order(is_repeatable=True) != paced


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_weights_of_a_group_are_never_newer_than_the_last_step(schedule: Schedule) -> None:
    assert schedule.oldest_version(10) <= 10 - schedule.steps_ahead
    assert schedule.oldest_version(10) == 10 - schedule.steps_ahead or not schedule.is_in_draw_order(is_repeatable=True)


def test_schedules_are_selected_by_name_with_their_own_settings() -> None:
    assert {name: cls.name for name, cls in SCHEDULES.items()} == {name: name for name in SCHEDULES}
    assert Async(max_staleness=2).model_dump() == {"mode": "async", "max_staleness": 2, "staleness": "paced"}
    assert Sync().model_dump() == {"mode": "sync"}
    with pytest.raises(ValidationError):
        Sync.model_validate({"max_staleness": 1})
