"""Live panel of a run in a terminal.

Invariant: the panel is never wider than the terminal, and shows at most `MAX_ROWS` environments.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from rich.box import ROUNDED
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlkit.metrics.rewards import draw_bars
from rlkit.trackers import Progress, RunInfo, RunResult, Tracker
from rlkit.trackers.console import KL, NLL, collect_rewards
from rlkit.trackers.rendering import render_duration, render_gain

REFRESHES_PER_SECOND = 4
RATE_WINDOW_S = 60.0
MAX_ROWS = 8
MAX_NAME_CHARS = 28
MAX_PANEL_CHARS = 120
NARROW_CHARS = 64

_FOLDER = re.compile(r"(?<= at )/\S*/(?=[^/\s]+$)")


def render_panel(
    run: RunInfo,
    progress: Progress,
    *,
    history: Mapping[str, Sequence[float]],
    metrics: Mapping[str, float],
    tokens_per_s: float | None,
    width: int,
    unicode: bool = True,
) -> RenderableType:
    """Render the panel for the current progress.

    Args:
        history: rewards so far by label, in the order of steps.
        metrics: metrics of the last step.
        tokens_per_s: rate of sampling; None if unknown.
        width: width of the terminal in characters.
        unicode: the terminal supports Unicode, so reward bars are drawn.
    """
    width = min(width, MAX_PANEL_CHARS)
    body = Table.grid(expand=True)
    body.add_row(_render_head(progress, tokens_per_s, narrow=width < NARROW_CHARS))
    if progress.phase != "done":  # no rollout is left to count
        body.add_row(_render_rollouts(progress, narrow=width < NARROW_CHARS))
    if progress.newest_error:
        text = f"newest failure: {' '.join(progress.newest_error.split())}"
        body.add_row(Text(_cut_middle(text, 2 * (width - 10)), style="red", overflow="fold"))
    if progress.activity:
        body.add_row(_line(progress.activity, "dim"))
    if health := _render_health(metrics):
        body.add_row(_line(health))
    model = run.model.rpartition("/")[2] if width < NARROW_CHARS else run.model
    names = list(dict.fromkeys([*run.envs, *history]))
    visible_names = names if len(names) <= MAX_ROWS else names[: MAX_ROWS - 1]
    body.add_row(_render_environments(visible_names, history, width=width - 4, unicode=unicode))
    if len(visible_names) < len(names):
        body.add_row(Text(f"and {len(names) - len(visible_names)} more", style="dim"))
    return Panel(
        body,
        box=ROUNDED,
        width=width,
        title=_truncate(run.name, width - 8),
        title_align="left",
        subtitle=_truncate(f"{model} on {run.service}", width - 8),
        subtitle_align="left",
        border_style="dim",
    )


def _render_head(progress: Progress, tokens_per_s: float | None, *, narrow: bool) -> RenderableType:
    total = max(progress.steps, progress.step)  # a run that is resumed with fewer steps has more behind it
    step = Text(f"step {progress.step}/{total}", style="bold")
    phase = Text(progress.phase, style="cyan")
    remaining = progress.seconds_left
    left = Text(render_duration(progress.seconds) if remaining is None else f"{render_duration(remaining)} left")
    if narrow:
        line = Text("  ").join([step, phase, left])
        line.no_wrap, line.overflow = True, "ellipsis"
        return line
    row = Table.grid(expand=True, padding=(0, 2, 0, 0))
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    for _ in range(3):
        row.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=max(total, 1), completed=progress.step)
    rate = Text("" if tokens_per_s is None else f"{tokens_per_s:.0f} tok/s")
    row.add_row(step, bar, phase, rate, left)
    return row


def _render_rollouts(progress: Progress, *, narrow: bool) -> Text:
    failed = Text(f"{progress.failed} failed", style="red" if progress.failed else "")
    if narrow:
        total = progress.running + progress.queued + progress.finished
        return _line(f"rollouts  {progress.finished} of {total} done  ").append_text(failed)
    counts = f"{progress.running} running  {progress.queued} queued  {progress.finished} finished  "
    return _line(f"rollouts  {counts}").append_text(failed)


def _render_health(metrics: Mapping[str, float]) -> str:
    """Render KL, entropy and the mean length of replies; skip missing metrics."""
    names = {"kl": KL, "nll": NLL, "entropy": "optim/entropy", "tokens": "env/all/turn_tokens/mean"}
    return "  ".join(f"{name} {_round(metrics[key])}" for name, key in names.items() if key in metrics)


def _round(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{round(value, 4) + 0.0:.2g}"  # + 0.0 turns −0.0 into 0.0


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _render_environments(
    names: Sequence[str], history: Mapping[str, Sequence[float]], *, width: int, unicode: bool
) -> RenderableType:
    arrow, number_width = ("→", 11) if unicode else ("->", 12)
    gains = {name: render_gain(values, arrow=arrow) for name, values in history.items() if values}
    number_width = max([number_width, *map(len, gains.values())])
    name_width = min(max(map(len, names), default=0), MAX_NAME_CHARS, max(width - number_width - 12, 6))
    bars_width = max(width - name_width - number_width - 4, 0)
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(width=name_width)
    rows.add_column(justify="right", width=number_width)
    rows.add_column(no_wrap=True)
    for name in names:
        values = history.get(name, ())
        bars = draw_bars(list(values)[-bars_width:], width=bars_width) if unicode else ""
        gain = gains.get(name, "…" if unicode else "-")
        rows.add_row(_truncate(name, name_width), _line(gain, "bold" if values else "dim"), Text(bars, style="green"))
    return rows


def _cut_middle(text: str, chars: int) -> str:
    """Shorten a long text, but keep its end: a reason of failure ends with a file, without its folder, and a line."""
    text = text if len(text) <= chars else _FOLDER.sub("", text)
    return text if len(text) <= chars else f"{text[: chars // 2]} … {text[-(chars // 2) :]}"


def _truncate(text: str, cells: int) -> Text:
    """Truncate `text` to one line of at most `cells` cells."""
    line = Text(text, no_wrap=True, overflow="ellipsis")
    line.truncate(max(cells, 1), overflow="ellipsis")
    return line


class PanelTracker(Tracker):
    """Draw the panel four times a second during a run, below notes to which `clean` was applied."""

    def __init__(self, console: Console, *, clean: Callable[[str], str] = str) -> None:
        self._console = console
        self._clean = clean
        self._live: Live | None = None
        self._status = console.status("", spinner="line")
        self._history: dict[str, list[float]] = {}
        self._metrics: Mapping[str, float] = {}
        self._rate = TokenRate()
        self._last: RenderableType = Text("")

    def on_start(self, run: RunInfo) -> None:  # noqa: D102  inherited
        self._status.stop()
        self.on_note(f"run {run.name} in {run.directory}")
        for step, metrics in run.earlier:
            self.on_step(step, metrics)
        _set_control_echo(False)
        draw = partial(self._draw, run)
        self._live = Live(console=self._console, get_renderable=draw, refresh_per_second=REFRESHES_PER_SECOND)
        self._live.start(refresh=True)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: D102  inherited
        for name, value in collect_rewards(metrics).items():
            self._history.setdefault(name, []).append(value)
        self._metrics = {**self._metrics, **metrics}  # a step without training has no KL

    def on_note(self, message: str) -> None:  # noqa: D102  inherited
        self._console.print(Text(self._clean(message)))

    def on_status(self, message: str) -> None:  # noqa: D102  inherited
        self._status.update(_line(self._clean(message)))
        self._status.start()

    def on_finish(self, result: RunResult | None) -> None:  # noqa: D102  inherited
        self.close()

    def close(self) -> None:
        """Stop redrawing, and leave the last panel on the terminal."""
        self._status.stop()
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            _set_control_echo(True)

    def _draw(self, run: RunInfo) -> RenderableType:
        # The run may change its progress while this thread reads it: on an error, show the previous panel.
        with suppress(Exception):
            progress = run.progress()
            self._last = render_panel(
                run,
                progress,
                history={name: list(values) for name, values in self._history.copy().items()},
                metrics=self._metrics,
                tokens_per_s=self._rate.update(progress.seconds, progress.tokens),
                width=self._console.width,
                unicode=self._console.encoding.lower().startswith("utf"),
            )
        return self._last


def _set_control_echo(is_on: bool) -> None:
    """Show or hide the `^C` that a terminal prints at Ctrl-C, because it tears the panel."""
    with suppress(Exception):  # a system or a terminal without this setting
        import termios

        # The terminal stops a process in the background that changes it.
        if sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp():
            attributes = termios.tcgetattr(0)
            flags = attributes[3]
            attributes[3] = flags | termios.ECHOCTL if is_on else flags & ~termios.ECHOCTL
            termios.tcsetattr(0, termios.TCSANOW, attributes)


class TokenRate:
    """Rate of tokens per second over the last `RATE_WINDOW_S`, by the run's clock."""

    def __init__(self) -> None:
        self._points = deque[tuple[float, int]]()

    def update(self, seconds: float, tokens: int) -> float | None:
        """Return the rate, given the total number of tokens at a time; None if it is unknown or 0."""
        self._points.append((seconds, tokens))
        while seconds - self._points[0][0] > RATE_WINDOW_S:
            self._points.popleft()
        since, before = self._points[0]
        return (tokens - before) / (seconds - since) if tokens > before and seconds > since else None
