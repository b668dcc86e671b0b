"""Console output of a run, as plain lines or as JSON.

Invariant: a step is one line. While a run is running, at most `QUIET_MAX_S` pass without a line. The caller decides
where lines are printed.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial

from rlkit.trackers import Progress, RunInfo, RunResult, Tracker
from rlkit.trackers.rendering import render_duration, render_number
from rlkit.types import Checkpoint

KL, NLL = "optim/kl_sample_train_v1", "optim/nll"

QUIET_S = 15.0  # seconds without output after which a progress line is printed
QUIET_MAX_S = 60.0
"""Longest time without output. The interval doubles from `QUIET_S`, so that a long wait prints few lines."""


def collect_rewards(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the mean reward of each environment of a step; the key of an evaluation is `eval <name>`."""
    evaluated = {f"eval {name}": value for name, value in _read_by_env(metrics, "eval", "reward/mean").items()}
    return _read_by_env(metrics, "env", "reward/mean") | evaluated


def collect_best_values(metrics: Mapping[str, float]) -> dict[str, str]:
    """Return, for each `discovery` environment, the best value and the value that a scripted search reaches."""
    best, scripted = (_read_by_env(metrics, "env", f"tasks/{name}") for name in ("best", "scripted"))
    references = {name: f" (scripted {value:.7g})" for name, value in scripted.items()}
    return {name: f"{value:.7g}{references.get(name, '')}" for name, value in best.items()}


def _read_by_env(metrics: Mapping[str, float], family: str, name: str) -> dict[str, float]:
    """Return a metric of each environment, such as `env/<key>/reward/mean`; not that of all together."""
    metric = re.compile(f"{family}/(?!all/)(.+)/{name}")
    return {match[1]: value for key, value in metrics.items() if (match := metric.fullmatch(key))}


def render_step(step: int, steps: int, metrics: Mapping[str, float], *, tokens: int = 0) -> str:
    """Render a step, such as `step 3/20  arithmetic 0.83  kl 0.0004  412 tok/s  2.1 s`; skip missing metrics."""
    parts = [f"step {step}/{steps}"]
    parts += [f"{name} {render_number(value)}" for name, value in collect_rewards(metrics).items()]
    parts += [f"best of {name} {text}" for name, text in collect_best_values(metrics).items()]
    if NLL in metrics:
        parts.append(f"nll {render_number(metrics[NLL])}")
    if KL in metrics:
        parts.append(f"kl {round(metrics[KL], 4) + 0.0:.4f}")  # + 0.0 turns −0.0 into 0.0
    if failed := metrics.get("env/all/failed"):
        parts.append(f"{failed:.0f} failed")
    if failed := metrics.get("eval/all/failed"):
        parts.append(f"{failed:.0f} of {metrics['eval/all/episodes']:.0f} failed in the evaluation")
    seconds = metrics.get("time/step_s")
    if seconds and tokens >= seconds:  # a first step that compiles has a rate of 0
        parts.append(f"{tokens / seconds:.0f} tok/s")
    if seconds is not None:
        parts.append(render_duration(seconds))
    return "  ".join(parts)


def render_progress(progress: Progress) -> str:
    """Render `step 3/20: sampling, 2 of 32 rollouts done; replies in progress: 30, tokens in them: 1,204`."""
    total = progress.queued + progress.running + progress.finished
    parts = [progress.phase, *([f"{progress.finished} of {total} rollouts done"] if total else [])]
    if progress.failed:
        parts.append(f"{progress.failed} failed")
    text = f"step {min(progress.step + 1, progress.steps)}/{progress.steps}: {', '.join(parts)}"
    return f"{text}; {progress.activity}" if progress.activity else text


class Heartbeat:
    """Print the progress of a run when nothing was printed for a while; `note` is called on a thread of its own."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, progress: Callable[[], Progress]) -> None:
        """Start watching a run; `progress` is called on the heartbeat's thread."""
        self._thread = threading.Thread(target=self._run, args=(progress,), name="rlkit-heartbeat", daemon=True)
        self._thread.start()

    def postpone(self) -> None:
        """Restart the interval, because a line was printed."""
        self._wake.set()

    def stop(self) -> None:
        """Stop printing, and wait for the thread to end."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, progress: Callable[[], Progress]) -> None:
        quiet_s = QUIET_S
        while not self._stopped:
            if self._wake.wait(quiet_s):
                self._wake.clear()
                quiet_s = QUIET_S
                continue
            try:
                self._note(render_progress(progress()))
            except (OSError, ValueError):  # the stream is full, broken or closed
                return
            quiet_s = min(2 * quiet_s, QUIET_MAX_S)


class ConsoleTracker(Tracker):
    """Print one plain line per step, and progress lines in long steps, with `note` (by default on stderr)."""

    def __init__(self, note: Callable[[str], None] | None = None) -> None:
        self._print = note or partial(print, file=sys.stderr, flush=True)
        self._heartbeat = Heartbeat(self._print)
        self._progress: Callable[[], Progress] = Progress
        self._tokens = 0

    def on_start(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._progress = run.progress
        self.on_note(f"run {run.name} in {run.directory}")
        self.on_note(f"training {run.model} on {', '.join(run.envs)} with {run.service}")
        self._heartbeat.start(run.progress)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: D102  inherited
        now = self._progress()
        self.on_note(render_step(step, now.steps, metrics, tokens=now.tokens - self._tokens))
        self._tokens = now.tokens

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:  # noqa: D102  inherited
        self.on_note(f"checkpoint of step {checkpoint.step}: {checkpoint.state}")

    def on_note(self, message: str) -> None:  # noqa: D102  inherited
        self._print(message)
        self._heartbeat.postpone()

    def on_finish(self, result: RunResult | None) -> None:  # noqa: D102  inherited
        self._heartbeat.stop()  # the caller of the run prints the result


class JsonTracker(ConsoleTracker):
    """Pass one JSON object per step to `emit`, with the keys of `metrics.jsonl`, and other lines to `note`."""

    def __init__(self, emit: Callable[[Mapping[str, float]], None], *, note: Callable[[str], None]) -> None:
        super().__init__(note)
        self._emit = emit

    def on_start(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._heartbeat.start(run.progress)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: D102  inherited
        self._emit({"step": step, **{key: float(value) for key, value in metrics.items()}})
        self._heartbeat.postpone()

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Print nothing, because the result contains the last checkpoint."""
