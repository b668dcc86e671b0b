from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlkit.trackers.rendering import render_gain


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ([0.08431, 0.4, 0.8125], "0.08 → 0.81"),
        ([0.0, 0.0], "0.00 → 0.00"),
        ([0.38115, 0.380881], "0.3811 → 0.3809"),
        ([0.0012, 0.034], "0.0012 → 0.034"),
        ([0.03125, 0.0], "0.031 → 0"),
        ([0.03125, 0.03126], "0.03125 → 0.03126"),
        ([-1200.0, -3.5], "-1200 → -3.5"),
        ([0.64], "0.64"),
    ],
)
def test_a_gain_shows_the_digits_that_differ(rewards: Sequence[float], text: str) -> None:
    assert render_gain(rewards) == text
