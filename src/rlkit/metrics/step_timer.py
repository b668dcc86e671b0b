"""Durations of the steps of a run.

Invariant: the durations of consecutive steps add up to the time of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rlkit._util.priority_semaphore import Slots


class StepTimer:
    """Duration of each step, measured from the end of the previous step."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._clock = asyncio.get_running_loop().time
        self.start()

    def start(self) -> None:
        """Start to time the next step."""
        self._start_s, self._start_busy_s = self._clock(), self._slots.busy_s

    def lap(self, complete_s: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics `time/…` of the step that ends now, whose last group was ready at `complete_s`.

        `utilisation` is the mean share of occupied slots. A step that took no time has no throughput.

        Args:
            metrics: metrics of the step, including its number of episodes and sampled tokens.
        """
        start_s, start_busy_s = self._start_s, self._start_busy_s
        self.start()
        seconds, busy_s = self._start_s - start_s, self._start_busy_s - start_busy_s
        times = {
            "time/sample_s": max(complete_s - start_s, 0.0),
            "time/train_s": self._start_s - max(complete_s, start_s),
            "time/step_s": seconds,
        }
        if seconds > 0:
            times["time/tokens_per_s"] = metrics["batch/sampled_tokens"] / seconds
            times["time/episodes_per_s"] = metrics["env/all/episodes"] / seconds
            times["time/utilisation"] = busy_s / (self._slots.count * seconds)
        return times
