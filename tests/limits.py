"""Limits that end a hang, and nothing else: no test measures anything by them, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 500.0
"""Seconds after which something hangs; below pytest's own limit, so that the test says what did."""


def wait_until(condition: Callable[[], object], *, why: Callable[[], object] = lambda: "it hangs") -> None:
    """Wait until a condition holds.

    Args:
        condition: asked again and again.
        why: the message if it never holds.
    """
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s, why()
        time.sleep(0.01)
