from __future__ import annotations

import threading

import pytest

from rlkit._util.activity import Activity, current_activity, use_activity


def test_nonzero_counts_are_listed_in_order_of_first_report() -> None:
    activity = Activity()
    activity.put("replies in progress", 30)
    activity.put("tokens in them", 1204)
    activity.add("programs")
    activity.put("replies in progress", 0)
    assert str(activity) == "tokens in them: 1,204, programs: 1"
    assert str(Activity()) == ""


def test_work_is_counted_until_it_ends_or_fails() -> None:
    activity = Activity()
    with activity.track("programs", 2), activity.track("programs"):
        assert activity.counts == {"programs": 3}
    assert not activity.counts
    with pytest.raises(ValueError, match="wrong"), activity.track("programs"):
        raise ValueError("wrong")
    assert not activity.counts


def test_reports_of_many_threads_are_all_counted() -> None:
    activity = Activity()
    threads = [
        threading.Thread(target=lambda: [activity.add("programs", n % 2 * 2 - 1) for n in range(1001)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert activity.counts == {"programs": -8}


def test_work_is_reported_to_its_run() -> None:
    first, second = Activity(), Activity()
    with use_activity(first):
        assert current_activity() is first
        with use_activity(second):
            current_activity().add("programs")
        assert current_activity() is first
    current_activity().add("programs")  # outside of a run it goes nowhere
    assert not first.counts
    assert second.counts == {"programs": 1}
