"""Rollouts that are drawn from a step, as text and as a page, for people.

Invariant: the same rollouts are drawn each time a step is shown.
"""

from __future__ import annotations

import html
import random
from collections.abc import Sequence

from rlkit.trackers.feed import Rollout

SHOWN_CHARS = 20_000
"""More of a conversation makes a table that no browser shows; the rest is in the run's folder."""


def drawn_from(rollouts: Sequence[Rollout], count: int, seed: int) -> list[Rollout]:
    """`count` of the rollouts, drawn at random and always the same ones for a seed; 0 for all."""
    if not count or len(rollouts) <= count:
        return list(rollouts)
    return random.Random(seed).sample(rollouts, count)


def conversation(rollout: Rollout) -> str:
    """All turns of a rollout as one text, as the model had it."""
    return "".join(f"{turn.prompt}{turn.completion}" for turn in rollout.turns)


def page(rollout: Rollout, step: int) -> str:
    """A rollout as a page of its own, what the model said set off from what it was given."""
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    head = f"step {step} · {rollout.env} · {rollout.task} · {rollout.status} · {reward}"
    turns = "".join(
        f"<pre>{html.escape(turn.prompt[:SHOWN_CHARS])}</pre>"
        f'<pre class="said">{html.escape(turn.completion[:SHOWN_CHARS])}</pre>'
        f"<p>{html.escape(turn.stop)}, weights {turn.version}"
        f"{'' if turn.reward is None else f', reward {turn.reward:g}'}</p>"
        for turn in rollout.turns
    )
    error = "" if rollout.error is None else f"<pre>{html.escape(rollout.error)}</pre>"
    return (
        '<!doctype html><meta charset="utf-8"><style>body{font-family:sans-serif}pre{white-space:pre-wrap;'
        "background:#f4f4f4;padding:.6em;margin:.3em 0}.said{background:#e3edff}p{color:#666;font-size:.8em}</style>"
        f"<h4>{html.escape(head)}</h4>{turns}{error}"
    )
