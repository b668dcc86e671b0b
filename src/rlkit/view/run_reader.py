"""A run of rlkit, read from its folder as data of the page.

Invariant: what a run of an earlier release did not record is None; what is damaged is a `UsageError` with its path.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any, override

import numpy as np
from numpy.typing import NDArray

from rlkit._util.files import json_lines
from rlkit._util.files.json_fields import pick, pick_rows
from rlkit._util.paths import ARTEFACTS
from rlkit.config.loading.resolved import read_settings
from rlkit.envs.harbor.trial_files import list_files
from rlkit.metrics.diagnostics import find_problems
from rlkit.metrics.run_summary import STEP_PATTERN, read_configuration, summarize_run
from rlkit.store import checkpoints
from rlkit.store.history import list_table_steps, read_metrics, table_path
from rlkit.token_records.pictures import VIEW_SCRIPT
from rlkit.token_records.pieces import decode_pieces, piece_to_json, pieces_path
from rlkit.token_records.updates import RecordedSequence, RecordedUpdate, place_numbers, update_path
from rlkit.types import TokenPiece
from rlkit.view import tables
from rlkit.view.records.reader import Place, RecordReader, Row, Step, make_data_uri
from rlkit.view.tables import cache_file

_GROUP = ("position", "draw", "env", "task")
_TURN = ("parent", "version", "stop", "reward", "seconds", "prompt", "completion", "messages", "images")
_PENDING = "not trained yet"
_DIGITS = 5  # decimals of log-probabilities and advantages on the page

_read_lines = cache_file(read_metrics)
_read_settings = cache_file(lambda path: read_configuration(path.parent, read_settings, default=[]))
_find_problems = cache_file(lambda path: [asdict(finding) for finding in find_problems(_read_lines(path))])


class RunReader(RecordReader):
    """Reader of a run's folder; each call reads the files as they are now."""

    kind = "rlkit"

    @property
    def _metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @override
    def summary(self) -> Row:
        return {"kind": self.kind, **summarize_run(self.path)}

    @override
    def run(self) -> Row:
        about = json_lines.read_object(self.path / "run.json")
        findings = [*_find_problems(self._metrics_path), *pick_rows(about, "findings")]
        config, damage = _read_settings(self.path / "config.yaml")
        settings = {name: value for name, value, _ in config}
        saved, summary = checkpoints(self.path), self.summary()
        return {
            **summary,
            "damaged": damage or summary["damaged"],
            "config": config,
            "findings": [{**row, "step": row["first"], "text": row.get("evidence")} for row in findings],
            "checkpoints": [{"step": each.step, "path": each.state, "expires": each.expires} for each in saved],
            "best_step": self._find_best_step(settings, {each.step for each in saved}),
            "versions": about.get("versions", {}),
            "steps_recorded": list_table_steps(self.path),
            "evaluations": list_table_steps(self.path, kind="evaluation"),
            "parts": ["discovery"] if self.search_envs() else [],
        }

    def _find_best_step(self, settings: Mapping[str, str], saved: Set[int]) -> int | None:
        """Return the first step with the best value of the metric that selects weights, of `saved` if there are any."""
        metric = json.loads(settings.get("best.metric", "null")) or "eval/all/reward/mean"
        lines = [(step, metrics) for step, metrics in _read_lines(self._metrics_path) if not saved or step in saved]
        values = {step: metrics[metric] for step, metrics in lines if metric in metrics}
        choose = min if settings.get("best.lower_is_better") == "true" else max
        return choose(values, key=values.__getitem__, default=None)

    @override
    def read_metrics(self) -> Mapping[int, Mapping[str, float | None]]:
        return dict(_read_lines(self._metrics_path))

    @override
    def list_steps(self) -> Sequence[Step]:
        return [(kind, number) for kind in ("step", "evaluation") for number in list_table_steps(self.path, kind=kind)]

    @override
    def has_step(self, step: Step) -> bool:
        return self._find_table(step).exists()  # to list all takes long in a run of many steps

    def _find_table(self, step: Step) -> Path:
        return table_path(self.path, step[1], kind=step[0])

    @override
    def read_groups(self, step: Step) -> Sequence[Row]:
        """Return the groups of a step in its order; `taught` is None where it is not known yet."""
        kind, number = step
        rows = sorted(tables.read_members(self._find_table(step)), key=lambda row: row["position"])
        updates = tables.read_updates(update_path(self.path, number)) if kind == "step" else {}
        ((_, last),) = json_lines.read_ends(self._metrics_path, {STEP_PATTERN: False})
        is_pending = not updates and number > last.get("step", 0)  # a step has metrics once it is trained
        reason = "evaluation" if kind == "evaluation" else _PENDING if is_pending else None
        groups = [list(attempts) for _, attempts in groupby(rows, key=lambda row: row["position"])]
        return [_make_group(attempts, updates.get(attempts[0]["draw"]), reason) for attempts in groups]

    @override
    def list_episodes(self, step: Step) -> Iterable[Sequence[Any]]:
        return tables.read_scores(self._find_table(step))

    @override
    def read_replies(self, step: Step, position: int) -> Mapping[Place, Row]:
        rows = tables.read_attempts(self._find_table(step), position)
        pieces = tables.read_texts(pieces_path(self.path))
        return {place: _show_attempt(row, pieces) for place, row in rows.items()}

    @override
    def read_episode(self, step: Step, place: Place) -> Row:
        """Return the turns of an episode, the text of its tokens, and what its environment recorded."""
        kind, number = step
        pieces = tables.read_texts(pieces_path(self.path))
        row = _show_attempt(tables.read_attempt(self._find_table(step), place), pieces)
        updates = tables.read_updates(update_path(self.path, number)) if kind == "step" and row["final"] else {}
        update = updates.get(row["draw"])
        sequences = None if update is None else [each for each in update.sequences if each.member == row["member"]]
        used = set[int]().union(*(turn[name] for turn in row["turns"] for name in ("prompt", "completion")))
        used &= pieces.keys()
        return {
            "error": row["error"],
            "info": row["info"],
            "turns": list(_list_turns(row["turns"], sequences)),
            "pieces": {str(token): piece_to_json(pieces[token].data) for token in used},
            "special": [token for token in used if pieces[token].is_special],
            "files": list_files(row["info"]),
            "view": _find_picture(row["info"], self.path, env=row["env"]),
        }

    @override
    def read_reply_texts(self, step: Step) -> Iterator[tuple[Place, Iterable[str]]]:
        pieces = tables.read_texts(pieces_path(self.path))
        for row in tables.read_completions(self._find_table(step)):
            texts = (turn.get("completion_text") or decode_pieces(pieces, turn["completion"]) for turn in row["turns"])
            yield (row["position"], row["member"], row["attempt"]), texts

    def search_envs(self) -> Sequence[str]:
        """Return the environments that recorded what they discovered."""
        return sorted({path.parent.name for path in (self.path / ARTEFACTS).glob("*/*.record.json")})


def _show_attempt(row: Row, pieces: Mapping[int, TokenPiece]) -> Row:
    """Return an attempt with its `info`, and with its turns as the page shows them."""
    turns = [_show_turn(turn, index, pieces) for index, turn in enumerate(row["turns"])]
    return {**row, "info": json.loads(row["info"]), "turns": turns}


def _show_turn(turn: Row, index: int, pieces: Mapping[int, TokenPiece]) -> Row:
    images = [make_data_uri(image["format"], image["data"]) for image in turn["images"] or ()]
    return {**turn, "images": images, "messages": _list_messages({**turn, "images": images}, index, pieces)}


def _make_group(attempts: Sequence[Row], update: RecordedUpdate | None, reason: str | None) -> Row:
    """Return a group from the rows of its attempts; a reason is why the whole step did not teach."""
    first, final = attempts[0], sorted((row for row in attempts if row["final"]), key=lambda row: row["member"])
    reason = (reason or _find_reason(final, update)) if first["counts"] else "replaced by another group"
    return {
        **{name: first[name] for name in _GROUP},
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
        **{name: value for name, value in row.items() if name not in (*_GROUP, "counts", "final")},
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


def _list_turns(turns: Sequence[Row], sequences: Sequence[RecordedSequence] | None) -> Iterator[Row]:
    """Yield each turn with the numbers of its tokens; `sequences` is None if no update of the group was recorded."""
    trained = place_numbers(sequences or (), turns)
    for index, turn in enumerate(turns):
        datum, numbers = trained.get(index, (None, np.full((2, len(turn["completion"])), np.nan)))
        yield {
            **{name: turn[name] for name in _TURN},
            "sampled": _ranges(np.array(turn["sampled"], np.bool_) | bool(turn.get("frozen"))),  # by an opponent
            "logprobs": _show_numbers(np.array(turn["logprobs"], np.float64)),
            "demonstration": any(np.isnan(turn["logprobs"][:1])),
            "advantages": None if sequences is None else _show_numbers(numbers[0]),
            "trainer_logprobs": None if sequences is None else _show_numbers(numbers[1]),
            "datum": datum,
        }


def _list_messages(turn: Row, index: int, pieces: Mapping[int, TokenPiece]) -> list[Row]:
    """Return the messages that a turn adds, its reply last; texts of its tokens if it has no messages."""
    if turn.get("messages"):
        messages = json.loads(turn["messages"])
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = [_place_image(part, turn["images"]) for part in message["content"]]
    else:
        # Tables of earlier releases have texts.
        texts = [turn.get(f"{name}_text") or decode_pieces(pieces, turn[name]) for name in ("prompt", "completion")]
        messages = [{"role": "prompt", "content": texts[0]}, {"role": "assistant", "content": texts[1]}]
    return [*messages[:-1], {**messages[-1], "turn": index, **({"name": turn["role"]} if turn.get("role") else {})}]


def _place_image(part: Row, images: Sequence[str]) -> Row:
    number = str(part.get("image", ""))[1:]
    return {**part, "image": images[int(number)]} if number.isdigit() and int(number) < len(images) else part


def _ranges(flags: NDArray[np.bool_]) -> list[list[int]]:
    """Return start and end of each run of True."""
    changes = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return changes.reshape(-1, 2).tolist()


def _show_numbers(values: NDArray[np.float64]) -> list[float | None]:
    """Return rounded numbers, None where there is none or an infinite one."""
    return np.where(np.isfinite(values), np.round(values, _DIGITS), np.array(None)).tolist()


def _find_picture(info: Row, directory: Path, *, env: str) -> Row | None:
    """Return what an environment draws itself: HTML of the episode, or a script of the run that draws episodes."""
    texts = {name: text for name in ("html", "script") if (text := pick(info, f"view.{name}", str))}
    if texts:
        return texts
    with suppress(OSError, ValueError):  # no file, or no name of a file
        script = (directory / ARTEFACTS / env / VIEW_SCRIPT).resolve(strict=True)
        if script.is_relative_to(directory.resolve()):
            return {"script": script.read_text(errors="replace")}
    return None
