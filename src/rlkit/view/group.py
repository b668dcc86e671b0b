"""The groups of a step as rows: what each episode earned, and whether the group taught."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from rlkit.token_records.pieces import decode_pieces, pieces_path
from rlkit.token_records.updates import RecordedUpdate, update_path
from rlkit.view.tables import Kind, Row, find_table, read_members, read_replies, read_texts, read_updates

_NAMES = ("member", "attempt", "status", "reward", "tokens", "turns", "seconds", "cut", "masked", "versions", "metrics")
_SNIPPET_CHARS = 80


def list_groups(directory: Path, kind: Kind, number: int) -> list[Row]:
    """Return the groups of a step or evaluation, in its order."""
    rows = sorted(read_members(find_table(directory, kind, number)), key=lambda row: row["position"])
    updates = read_updates(update_path(directory, number)) if kind == "step" else None
    return [make_group(list(attempts), updates) for _, attempts in groupby(rows, key=lambda row: row["position"])]


def make_group(attempts: Sequence[Row], updates: Mapping[int, RecordedUpdate] | None) -> Row:
    """Return a group from the rows of its attempts.

    Args:
        updates: recorded updates of the step by draw, empty if none was recorded; None for an evaluation.
    """
    first = attempts[0]
    update = (updates or {}).get(first["draw"])
    final = sorted((row for row in attempts if row["final"]), key=lambda row: row["member"])
    reason = "evaluation" if updates is None else _find_reason(final, is_trained=first["counts"], update=update)
    return {
        **{name: first[name] for name in ("position", "draw", "env", "task")},
        "taught": reason is None,
        "reason": reason,
        "estimator": None if update is None else update.estimator,
        "baseline": None if update is None else update.baseline,
        "members": [make_member(row, update) for row in final],
        "failed_attempts": [make_member(row, None) for row in attempts if not row["final"]],
    }


def make_member(row: Row, update: RecordedUpdate | None) -> Row:
    """Return an episode as a member of its group; its advantage is the mean over its trained tokens."""
    rows = [] if update is None else [s.advantages for s in update.sequences if s.member == row["member"]]
    values = np.concatenate([np.empty(0, np.float32), *rows])
    error, is_compared = row["error"], update is not None and row["reward"] is not None and not row["masked"]
    return {
        **{name: row[name] for name in _NAMES},
        # A sequence whose advantages are all 0 is not trained.
        "advantage": float(values.mean()) if len(values) else 0.0 if is_compared else None,
        "error": error.splitlines()[0] if error else None,
    }


def _find_reason(final: Sequence[Row], *, is_trained: bool, update: RecordedUpdate | None) -> str | None:
    """Return why a group taught nothing; None if it did."""
    rewards: list[float] = [row["reward"] for row in final if row["reward"] is not None and not row["masked"]]
    if not is_trained:
        return "replaced by another group"
    if update is not None and update.sequences:
        return None
    if not rewards:
        return "all masked" if any(row["masked"] for row in final) else "no episode has a reward"
    if max(rewards) - min(rewards) <= 1e-9 * max(map(abs, rewards)):
        return "equal rewards" if len(rewards) > 1 else f"1 of {len(final)} episodes has a reward"
    return None if update is None else "no advantage"


def search_replies(directory: Path, kind: Kind, number: int, text: str) -> list[list[Any]]:
    """Return position, member, attempt and an excerpt of each episode with a text in a reply, whatever its case."""
    pieces, matches = read_texts(pieces_path(directory)), list[list[Any]]()
    pattern = re.compile(re.escape(text), re.IGNORECASE)
    for row in read_replies(find_table(directory, kind, number)) if text else ():
        for turn in row["turns"]:
            reply = turn.get("completion_text") or decode_pieces(pieces, turn["completion"])
            if match := pattern.search(reply):
                excerpt = reply[max(match.start() - _SNIPPET_CHARS, 0) : match.end() + _SNIPPET_CHARS]
                matches.append([row["position"], row["member"], row["attempt"], excerpt])
                break
    return sorted(matches)
