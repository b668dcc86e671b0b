"""Draw what a run does under each schedule: its live rollouts, and the requests of its training, in virtual time.

    python scripts/plot_schedules.py --out docs/assets/schedules.svg

The runs are those of benchmarks/schedule.py on the simulated service; only their first steps are drawn.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from charts import save_chart
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import service
from schedule import Run, rlkit_run
from workloads import WORKLOADS, Played

SHOWN_S = 400.0
COLOURS = {"gradient": "#e8590c", "step": "#c2255c", "save": "#868e96"}
NAMES = {"gradient": "gradient", "step": "optimiser step", "save": "new weights"}
RUNS = {"sync": Run("drawn", "sync"), "stream": Run("drawn", "stream"), "async": Run("drawn", "async", 1)}


@dataclass
class Trace:
    """Times of a run, in seconds."""

    live: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    requests: list[tuple[str, float, float]] = field(default_factory=list[tuple[str, float, float]])


def record(trace: Trace) -> None:
    """Make the simulated service and the rollouts report to a trace."""

    def count_with(method: Callable[..., None]) -> Callable[..., None]:
        def counted(played: Played, *arguments: Any) -> None:
            method(played, *arguments)
            trace.live.append((asyncio.get_running_loop().time(), played.live))

        return counted

    class Training(service.Training):
        def _enqueue[T](self, call: str, seconds: float, work: Callable[[], T]) -> Any:
            start_s = max(asyncio.get_running_loop().time(), self._busy_until_s)
            trace.requests.append((call, start_s, seconds))
            return super()._enqueue(call, seconds, work)

    service.Training = Training  # type: ignore[misc]  the service makes its clients of this class
    Played.begin, Played.end = count_with(BEGIN), count_with(END)  # type: ignore[method-assign]  reports to the trace


BEGIN, END, TRAINING = Played.begin, Played.end, service.Training


def trace_run(run: Run) -> Trace:
    """Play a run, and return its times from its first rollout on."""
    trace = Trace()
    service.Training = TRAINING  # type: ignore[misc]  without the trace of an earlier run
    record(trace)
    with tempfile.TemporaryDirectory() as folder:
        rlkit_run(run, Path(folder) / "run")
    began_s = trace.live[0][0]
    live = {time_s - began_s: count for time_s, count in trace.live if time_s - began_s <= SHOWN_S}
    return Trace(list(live.items()), [(call, start_s - began_s, seconds) for call, start_s, seconds in trace.requests])


def draw() -> Figure:
    """Return the chart."""
    WORKLOADS["drawn"] = replace(WORKLOADS["math"], steps=16)  # type: ignore[index]  a workload of this chart only
    figure, panels = plt.subplots(len(RUNS), 1, figsize=(7.2, 5.0), layout="constrained", sharex=True)
    for axes, (name, run) in zip(panels, RUNS.items(), strict=True):
        trace = trace_run(run)
        times, counts = zip(*trace.live, strict=True)
        axes.fill_between(times, counts, step="post", color="#3b5bdb", alpha=0.3, linewidth=0, label="live rollouts")
        top = max(counts)
        for call, colour in COLOURS.items():
            spans = [(start_s, seconds) for kind, start_s, seconds in trace.requests if kind == call]
            axes.broken_barh(spans, (-0.35 * top, 0.25 * top), facecolors=colour, label=NAMES[call])
        steps = sum(kind == "step" and start_s + seconds <= SHOWN_S for kind, start_s, seconds in trace.requests)
        axes.set_title(f"{name}: {steps} steps", loc="left", fontsize=11)
        axes.set(xlim=(0, SHOWN_S), yticks=[0, 256])
    panels[-1].set_xlabel("seconds of the simulated service")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    save_chart(draw, __doc__)
