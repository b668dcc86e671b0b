from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rlkit.metrics.rewards import draw_bars
from rlkit.trackers import Progress, RunInfo, RunResult
from rlkit.trackers.console import ConsoleTracker, JsonTracker, render_step
from rlkit.trackers.panel import MAX_ROWS, PanelTracker, TokenRate, render_panel
from rlkit.trackers.rendering import render_duration, render_number
from rlkit.types import Checkpoint

METRICS = {
    "env/arithmetic/reward/mean": 0.8312,
    "env/all/reward/mean": 0.8312,
    "env/all/failed": 0.0,
    "optim/kl_sample_train_v1": 0.0004,
    "time/step_s": 2.1,
}
IDLE = Progress()


def run_info(*, envs: tuple[str, ...] = ("arithmetic",), progress: Progress = IDLE, name: str = "first") -> RunInfo:
    return RunInfo(name, Path("/runs") / name, "acme/tiny", envs, "the embedded engine", lambda: progress)


def rendered(
    info: RunInfo,
    *,
    width: int,
    history: dict[str, list[float]] | None = None,
    metrics: dict[str, float] | None = None,
    unicode: bool = True,
) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    options: dict[str, Any] = {"tokens_per_s": 412.0, "width": width, "unicode": unicode}
    panel = render_panel(info, info.progress(), history=history or {}, metrics=metrics or {}, **options)
    with console.capture() as captured:
        console.print(panel)
    return captured.get()


def test_a_step_is_one_line() -> None:
    assert render_step(3, 20, METRICS, tokens=865) == "step 3/20  arithmetic 0.83  kl 0.0004  412 tok/s  2.1 s"
    assert render_step(3, 20, METRICS, tokens=2) == "step 3/20  arithmetic 0.83  kl 0.0004  2.1 s"


def test_a_step_line_says_what_failed_and_what_was_evaluated() -> None:
    metrics = {"eval/hard/reward/mean": 0.5, "eval/all/reward/mean": 0.5, "env/all/failed": 3.0}
    assert render_step(0, 5, metrics) == "step 0/5  eval hard 0.50  3 failed"


def test_a_search_shows_its_best_beside_what_a_scripted_one_reached() -> None:
    metrics = {"env/erdos/reward/mean": 2.6, "env/erdos/tasks/best": 0.38102341, "env/erdos/tasks/scripted": 0.381}
    assert render_step(2, 5, metrics) == "step 2/5  erdos 2.60  best of erdos 0.3810234 (scripted 0.381)"
    assert render_step(2, 5, {"env/own/tasks/best": 3.0}) == "step 2/5  best of own 3"


def test_a_step_without_metrics_is_still_a_line() -> None:
    assert render_step(1, 2, {}) == "step 1/2"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.7, "1 min 0 s"), (3599.6, "1 h 0 min"), (7500, "2 h 5 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert render_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.00"), (0.8312, "0.83"), (0.00012, "0.00012"), (-0.5, "-0.50"), (123456, "1.235e+05")]
)
def test_number(value: float, text: str) -> None:
    assert render_number(value) == text


def test_plain_lines_tell_the_story_of_a_run() -> None:
    lines: list[str] = []
    tracker = ConsoleTracker(lines.append)
    progress = [Progress(steps=20, tokens=0), Progress(step=1, steps=20, tokens=865)]
    tracker.on_note("fetching the model")
    tracker.on_start(
        RunInfo("first", Path("/runs/first"), "acme/tiny", ("arithmetic",), "the engine", lambda: progress[-1])
    )
    tracker.on_step(1, METRICS)
    tracker.on_checkpoint(Checkpoint(1, "tinker://x/weights/a", "tinker://x/sampler_weights/a"))
    tracker.on_finish(None)
    assert lines == [
        "fetching the model",
        "run first in /runs/first",
        "training acme/tiny on arithmetic with the engine",
        "step 1/20  arithmetic 0.83  kl 0.0004  412 tok/s  2.1 s",
        "checkpoint of step 1: tinker://x/weights/a",
    ]


def test_tokens_per_second_are_those_of_the_step_alone() -> None:
    lines: list[str] = []
    now = [Progress(steps=2, tokens=1000)]
    tracker = ConsoleTracker(lines.append)
    tracker.on_start(RunInfo("a", Path("/a"), "m", ("e",), "s", lambda: now[0]))
    tracker.on_step(1, {"time/step_s": 1.0})
    now[0] = Progress(steps=2, tokens=1500)
    tracker.on_step(2, {"time/step_s": 1.0})
    assert lines[-2:] == ["step 1/2  1000 tok/s  1.0 s", "step 2/2  500 tok/s  1.0 s"]


def test_the_default_console_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleTracker().on_note("hello")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\n")


def test_json_steps_have_the_keys_of_metrics_jsonl() -> None:
    steps: list[str] = []
    notes: list[str] = []
    tracker = JsonTracker(lambda record: steps.append(json.dumps(record)), note=notes.append)
    tracker.on_start(run_info())
    tracker.on_step(1, METRICS)
    tracker.on_note("odd")
    tracker.on_checkpoint(Checkpoint(1, "a", "b"))
    tracker.on_finish(RunResult("first", Path("/runs/first"), "completed", 1))
    assert [json.loads(step) for step in steps] == [{"step": 1, **METRICS}]
    assert notes == ["odd"]


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
@pytest.mark.parametrize("count", [1, 5, 40])
def test_the_panel_is_never_wider_than_the_terminal_and_never_high(width: int, count: int) -> None:
    names = tuple(f"environment-with-a-long-name-{i}-{'x' * 40}" for i in range(count))
    progress = Progress(3, 20, "sampling", queued=400, running=120, finished=76, failed=2, tokens=10**6, seconds=200)
    info = run_info(envs=names, progress=progress, name="run-" + "y" * 100)
    text = rendered(info, width=width, history={name: [i / 9 for i in range(200)] for name in names})
    lines = text.splitlines()
    assert max(map(len, lines)) <= min(width, 120)
    assert len(lines) <= 4 + MAX_ROWS


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_what_matters(width: int) -> None:
    progress = Progress(
        3, 20, "sampling", queued=40, running=12, finished=76, failed=2, tokens=1234, seconds=30, warm_up_s=10
    )
    envs = ("arithmetic", "gsm8k", "erdos", "harbor.terminal", "openreward-session-with-a-name-that-never-ends")
    text = rendered(run_info(envs=envs, progress=progress), width=width, history={"arithmetic": [0.1, 0.5, 0.83]})
    for part in (
        "step 3/20",
        "sampling",
        "412 tok/s",
        "2 min 50 s left",
        "12 running  40 queued  76 finished  2 failed",
        "arithmetic",
        "0.10 → 0.83  ▁▅█",
        "openreward-session-with-a-n…",
        "acme/tiny on the embedded engine",
        "first",
    ):
        assert part in text


def test_the_time_left_counts_neither_the_first_step_nor_a_run_that_has_ended() -> None:
    progress = Progress(step=5, steps=10, first_step=2, seconds=100, warm_up_s=80)
    assert progress.seconds_left == 50  # two steps took 20 s
    assert replace(progress, step=3).seconds_left is None
    assert replace(progress, phase="done").seconds_left is None


HEALTH = {"optim/kl_sample_train_v1": 0.00042, "optim/entropy": 0.125, "env/all/turn_tokens/mean": 1834.2}


def test_the_panel_shows_kl_entropy_lengths_and_the_newest_failure() -> None:
    progress = Progress(3, 20, "sampling", failed=2, newest_error="RuntimeError: no such\ntable")
    text = rendered(run_info(progress=progress), width=80, metrics=HEALTH)
    assert "kl 0.0004  entropy 0.12  tokens 1,834" in text
    assert "newest failure: RuntimeError: no such table" in text


@pytest.mark.parametrize("width", [46, 80])
def test_a_run_that_has_ended_counts_no_rollouts(width: int) -> None:
    progress = Progress(20, 20, "saving", newest_error="RuntimeError: no such table")
    assert "rollouts  0" in rendered(run_info(progress=progress), width=width)
    text = rendered(run_info(progress=replace(progress, phase="done")), width=width)
    assert "rollouts" not in text
    assert "newest failure: RuntimeError: no such" in text


@pytest.mark.parametrize("width", [46, 80, 120])
def test_a_long_reason_of_a_failure_takes_two_lines_with_its_file_and_line(width: int) -> None:
    error = f"ValueError: {'the answer has no number ' * 20} at /home/me/{'projects/' * 8}env.py:12"
    shown = rendered(run_info(progress=Progress(3, 20, "sampling", failed=2, newest_error=error)), width=width)
    lines = [line.strip("│ ") for line in shown.splitlines()]
    (first,) = (number for number, line in enumerate(lines) if line.startswith("newest failure: ValueError:"))
    assert lines[first + 1].endswith("env.py:12")
    assert max(map(len, shown.splitlines())) <= width


def test_a_long_reason_of_a_failure_first_loses_the_folder_of_its_file() -> None:
    error = "KeyError: \"no column 'answer'\" at /home/me/projects/envs/env.py:12"
    shown = rendered(run_info(progress=Progress(3, 20, "sampling", failed=2, newest_error=error)), width=46)
    words = " ".join(" ".join(line.strip("│ ") for line in shown.splitlines()).split())
    assert "newest failure: KeyError: \"no column 'answer'\" at env.py:12" in words


def test_the_panel_fits_46_columns() -> None:
    progress = Progress(3, 20, "evaluating", queued=40, running=12, finished=76, failed=2, tokens=1234, seconds=3000)
    progress = replace(progress, warm_up_s=1000)
    history = {"arithmetic": [0.1, 0.5, 0.83], "eval arithmetic": [0.9, 1.0]}
    text = rendered(run_info(progress=progress), width=46, history=history, metrics=HEALTH)
    for part in (
        "step 3/20  evaluating  4 h 43 min left",
        "76 of 128 done  2 failed",
        "0.10 → 0.83  ▁▅█",
        "0.90 → 1.00",
    ):
        assert part in text
    assert "…" not in text


def test_a_run_that_is_resumed_with_fewer_steps_is_at_its_last_step() -> None:
    assert "step 14/14" in rendered(run_info(progress=Progress(14, 12, "saving")), width=80)


def test_the_chart_of_a_resumed_run_begins_at_its_first_step() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    tracker = PanelTracker(console)
    earlier = [(step, {"env/arithmetic/reward/mean": step / 10}) for step in range(1, 4)]
    tracker.on_start(replace(run_info(), earlier=earlier))
    tracker.on_step(4, METRICS)
    tracker.close()
    assert "0.10 → 0.83" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_terminal_without_unicode_gets_no_bars() -> None:
    text = rendered(run_info(), width=80, history={"arithmetic": [0.1, 0.5]}, unicode=False)
    assert not set(text) & set("▁▂▃▄▅▆▇█…")


@given(st.lists(st.floats(-1e12, 1e12), max_size=50), st.integers(-3, 60))
def test_a_chart_has_a_bar_for_each_value_within_its_width(values: list[float], cells: int) -> None:
    assert len(draw_bars(values, width=cells)) == max(0, min(len(values), cells))


def test_a_chart_runs_from_the_lowest_to_the_highest() -> None:
    assert draw_bars([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"


def test_the_rate_is_that_of_the_last_minute() -> None:
    rate = TokenRate()
    assert rate.update(0, 0) is None
    assert rate.update(10, 1000) == 100
    assert rate.update(60, 1000) == pytest.approx(1000 / 60)
    assert rate.update(100, 3000) == pytest.approx(2000 / 40)


def test_the_panel_lives_from_start_to_finish_and_notes_appear_above_it() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    tracker = PanelTracker(console, clean=lambda text: text.replace("secret", "***"))
    tracker.on_note("before [bold]the[/] secret run")
    tracker.on_start(run_info())
    tracker.on_step(1, METRICS)
    tracker.on_note("a note")
    tracker.on_finish(None)
    tracker.close()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "before [bold]the[/] *** run" in text
    assert "a note" in text
    assert "0.83" in text
    assert text.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_the_steps_of_a_preparation_share_one_line_that_the_start_removes() -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=True)
    tracker = PanelTracker(console)
    for message in ("fetching a secret model", "converting the weights 10 %", "converting the weights 90 %"):
        tracker.on_status(message)
    tracker.on_note("a note")
    tracker.on_start(run_info())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    tracker.close()
    shown = list[str]()
    for line in text.split("\n"):
        if "\x1b[1A\x1b[2K" in line:  # up and erased
            shown.pop()
        shown.append(line.rpartition("\x1b[2K")[2])
    assert shown[0].endswith("a note")
    assert shown[1] == "run first in /runs/first"


def test_a_run_whose_progress_cannot_be_read_does_not_break_the_terminal() -> None:
    def broken() -> Progress:
        raise RuntimeError("dictionary changed size during iteration")

    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    tracker = PanelTracker(console)
    tracker.on_start(RunInfo("a", Path("/a"), "m", ("e",), "s", broken))
    tracker.on_step(1, METRICS)
    tracker.on_finish(None)
    assert "\x1b[?25h" in console.file.getvalue()  # type: ignore[attr-defined]
