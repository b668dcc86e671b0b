"""A run in a notebook: a line with a small chart, and its page in a frame.

Invariant: showing a result never fails; what cannot be read is left out.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

from rlkit.errors import RlkitError
from rlkit.store.history import read_metrics
from rlkit.view.library import Library
from rlkit.view.run_reader import mean_reward
from rlkit.view.server import ViewServer

_BARS = "▁▂▃▄▅▆▇█"
_BARS_MAX = 24


@dataclass(frozen=True)
class RunView:
    """The page of a run; a notebook shows it in a frame."""

    link: str

    def __str__(self) -> str:
        return self.link

    def _repr_html_(self) -> str:
        link = html.escape(self.link)
        frame = f'<iframe src="{link}" width="100%" height="720" style="border: 1px solid #8884"></iframe>'
        return f'<p><a href="{link}" target="_blank">{link}</a></p>{frame}'


@cache
def view_run(directory: Path) -> RunView:
    """Serve the page of a run in the background of this process, and return its view."""
    server = ViewServer(Library([directory]), frame_ancestors="http://localhost:* http://127.0.0.1:*")
    threading.Thread(target=server.run, name="rlkit_view", daemon=True).start()
    return RunView(f"{server.link}#/run/{quote(directory.name, safe='')}")


def read_rewards(directory: Path) -> list[float]:
    """Return the mean reward of each step; none if they cannot be read."""
    with suppress(RlkitError, OSError):
        rewards = (mean_reward(metrics, "env") for _, metrics in read_metrics(directory / "metrics.jsonl"))
        return [reward for reward in rewards if reward is not None]
    return []


def draw_bars(values: Sequence[float]) -> str:
    """Return a chart of blocks, at most `_BARS_MAX` wide; each is the mean of its steps."""
    if not values:
        return ""
    count = min(len(values), _BARS_MAX)
    ends = [round(place * len(values) / count) for place in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]
    low, high = min(means), max(means)
    return "".join(_BARS[int((mean - low) / ((high - low) or 1) * (len(_BARS) - 1))] for mean in means)
