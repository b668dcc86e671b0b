"""The groups of a step as rows: what each episode earned, and whether the group taught."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from rlkit.token_records.pieces import decode_pieces, pieces_path
from rlkit.token_records.updates import RecordedUpdate, update_path
from rlkit.view.records.reader import Match, Row, Step, find_excerpt
from rlkit.view.tables import find_table, read_completions, read_members, read_texts, read_updates

_NAMES = ("member", "attempt", "status", "reward", "tokens", "turns", "seconds", "cut", "masked", "versions", "metrics")
_PENDING = "not trained yet"


def list_groups(directory: Path, step: Step, *, last_measured: int) -> list[Row]:
    """Return the groups of a step or evaluation, in its order; `taught` is None where it is not known yet.

    Args:
        last_measured: last step with metrics, which a step gets once it is trained.
    """
    kind, number = step
    rows = sorted(read_members(find_table(directory, step)), key=lambda row: row["position"])
    updates = read_updates(update_path(directory, number)) if kind == "step" else {}
    is_pending = not updates and number > last_measured
    reason = "evaluation" if kind == "evaluation" else _PENDING if is_pending else None
    groups = [list(attempts) for _, attempts in groupby(rows, key=lambda row: row["position"])]
    return [_make_group(attempts, updates.get(attempts[0]["draw"]), reason) for attempts in groups]


def _make_group(attempts: Sequence[Row], update: RecordedUpdate | None, reason: str | None) -> Row:
    """Return a group from the rows of its attempts.

    Args:
        reason: reason why the whole step did not teach, if there is one.
    """
    first, final = attempts[0], sorted((row for row in attempts if row["final"]), key=lambda row: row["member"])
    reason = (reason or _find_reason(final, update)) if first["counts"] else "replaced by another group"
    return {
        **{name: first[name] for name in ("position", "draw", "env", "task")},
        "taught": None if reason == _PENDING else reason is None,
        "reason": reason,
        "estimator": None if update is None else update.estimator,
        "baseline": None if update is None else update.baseline,
        "members": [_make_member(row, update) for row in final],
        "failed_attempts": [_make_member(row, None) for row in attempts if not row["final"]],
    }


def _make_member(row: Row, update: RecordedUpdate | None) -> Row:
    """Return an episode as a member of its group; its advantage is the mean over its trained tokens."""
    rows = [] if update is None else [s.advantages for s in update.sequences if s.member == row["member"]]
    values = np.concatenate([np.empty(0, np.float32), *rows])
    is_compared = update is not None and row["reward"] is not None and not row["masked"]
    return {
        **{name: row[name] for name in _NAMES},
        # A sequence whose advantages are all 0 is not trained.
        "advantage": float(values.mean()) if len(values) else 0.0 if is_compared else None,
        "error": row["error"].splitlines()[0] if row["error"] else None,
    }


def _find_reason(final: Sequence[Row], update: RecordedUpdate | None) -> str | None:
    """Return why a group of a trained step taught nothing; None if it did."""
    rewards: list[float] = [row["reward"] for row in final if row["reward"] is not None and not row["masked"]]
    if update is not None and update.sequences:
        return None
    if not rewards:
        return "all masked" if any(row["masked"] for row in final) else "no episode has a reward"
    if max(rewards) - min(rewards) <= 1e-9 * max(map(abs, rewards)):
        return "equal rewards" if len(rewards) > 1 else f"1 of {len(final)} episodes has a reward"
    return None if update is None else "no advantage"


def search_replies(directory: Path, step: Step, text: str) -> list[Match]:
    """Return the episodes with a text in a reply, whatever its case."""
    pieces, matches = read_texts(pieces_path(directory)), list[Match]()
    pattern = re.compile(re.escape(text), re.IGNORECASE)
    for row in read_completions(find_table(directory, step)) if text else ():
        for turn in row["turns"]:
            reply = turn.get("completion_text") or decode_pieces(pieces, turn["completion"])
            if (excerpt := find_excerpt(pattern, reply)) is not None:
                matches.append((row["position"], row["member"], row["attempt"], excerpt))
                break
    return sorted(matches)
