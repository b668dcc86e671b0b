"""A run as plain lines or as JSON.

Invariant: a step is one line. Where the lines go is the caller's choice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

from rlkit.trackers import Progress, RunInfo, RunResult, Tracker
from rlkit.trackers.heartbeat import Heartbeat
from rlkit.types import Checkpoint

KL = "optim/kl_sample_train_v1"


def rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the mean reward of each environment of a step, those of an evaluation as `eval <name>`."""
    means = dict[str, float]()
    for prefix, label in (("env/", ""), ("eval/", "eval ")):
        for key, value in metrics.items():
            name = key.removeprefix(prefix).removesuffix("/reward/mean")
            if key == f"{prefix}{name}/reward/mean" and name != "all":
                means[label + name] = value
    return means


def searches(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return the best value of each environment that searches, beside it the value that a scripted search reaches."""
    best = dict[str, str]()
    for key, value in metrics.items():
        name = key.removeprefix("env/").removesuffix("/tasks/best")
        if key == f"env/{name}/tasks/best":
            scripted = metrics.get(f"env/{name}/tasks/scripted")
            best[name] = f"{value:.7g}" + ("" if scripted is None else f" (scripted {scripted:.7g})")
    return best


def step_line(step: int, steps: int, metrics: Mapping[str, float], *, tokens: int = 0) -> str:
    """Return `step 3/20  arithmetic 0.83  kl 0.0004  412 tok/s  2.1 s`, with what the metrics have of it.

    Args:
        tokens: tokens sampled in this step.
    """
    parts = [f"step {step}/{steps}", *(f"{name} {number(value)}" for name, value in rewards(metrics).items())]
    parts += [f"best of {name} {text}" for name, text in searches(metrics).items()]
    if KL in metrics:
        parts.append(f"kl {round(metrics[KL], 4) + 0.0:.4f}")  # + 0.0 turns −0.0 into 0.0
    if failed := metrics.get("env/all/failed"):
        parts.append(f"{failed:.0f} failed")
    seconds = metrics.get("time/step_s")
    if seconds and tokens:
        parts.append(f"{tokens / seconds:.0f} tok/s")
    if seconds is not None:
        parts.append(duration(seconds))
    return "  ".join(parts)


def number(value: float) -> str:
    """Return two decimals where they tell something, four digits otherwise."""
    return f"{value:.2f}" if 0.1 <= abs(value) < 1000 or value == 0 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return `2.1 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


class ConsoleTracker(Tracker):
    """One plain line a step, and lines about a step that takes long.

    Args:
        say: takes a line without its end; prints it on stderr by default.
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._print = say or _print_on_stderr
        self._heartbeat = Heartbeat(self._print)
        self._progress: Callable[[], Progress] = Progress
        self._tokens = 0

    def started(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._progress = run.progress
        self.note(f"run {run.name} in {run.directory}")
        self.note(f"training {run.model} on {', '.join(run.envs)} with {run.service}")
        self._heartbeat.start(run.progress)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: D102  inherited
        now = self._progress()
        self.note(step_line(step, now.steps, metrics, tokens=now.tokens - self._tokens))
        self._tokens = now.tokens

    def checkpoint(self, checkpoint: Checkpoint) -> None:  # noqa: D102  inherited
        self.note(f"checkpoint of step {checkpoint.step}: {checkpoint.state}")

    def note(self, message: str) -> None:  # noqa: D102  inherited
        self._print(message)
        self._heartbeat.postpone()

    def finished(self, result: RunResult | None) -> None:  # noqa: D102  inherited
        self._heartbeat.stop()  # the result is printed by whoever asked for the run


def _print_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class JsonTracker(Tracker):
    """One JSON object a step, with the keys of `metrics.jsonl`.

    Args:
        emit: takes an object.
        say: takes a line that is not a step.
    """

    def __init__(self, emit: Callable[[Mapping[str, float]], None], *, say: Callable[[str], None]) -> None:
        self._emit = emit
        self._say = say
        self._heartbeat = Heartbeat(say)

    def started(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._heartbeat.start(run.progress)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: D102  inherited
        self._emit({"step": step, **{key: float(value) for key, value in metrics.items()}})
        self._heartbeat.postpone()

    def note(self, message: str) -> None:  # noqa: D102  inherited
        self._say(message)
        self._heartbeat.postpone()

    def finished(self, result: RunResult | None) -> None:  # noqa: D102  inherited
        self._heartbeat.stop()
