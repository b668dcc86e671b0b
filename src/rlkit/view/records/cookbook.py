"""Log folders of tinker-cookbook: `metrics.jsonl`, `config.json`, and the rollouts of each iteration.

Invariant: an episode shows a conversation of the rollout log only if their rewards are equal. The log names no member,
so that members of a group with equal rewards may show each other's.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, override

from rlkit.view.records import reader
from rlkit.view.records.reader import LogReader, Row, Step, pick, pick_list, pick_object, pick_rows

_SUFFIX = "_rollout_summaries.jsonl"
_REWARD, _EVALUATION = "env/all/reward/mean", "eval/test/reward/mean"
_LIMITS = ("max_tokens_reached", "context_overflow", "stop/max_", "stop/rollout_timeout")


class CookbookReader(LogReader):
    """Reader of a log folder. An iteration's training rollouts are a step, and its other rollouts an evaluation."""

    kind = "cookbook"

    @cached_property
    def _groups(self) -> dict[Step, list[tuple[str, list[Row], list[Row]]]]:
        """Groups of the steps that were read: the name of the file, rollouts, and replies of the log."""
        return {}

    @cached_property
    def _files(self) -> dict[Step, list[Path]]:
        files = dict[Step, list[Path]]()
        for path in sorted(self.path.glob(f"iteration_[0-9]*/*{_SUFFIX}")):
            number = path.parent.name.removeprefix("iteration_")
            kind = "step" if path.name == f"train{_SUFFIX}" else "evaluation"
            if number.isdecimal():
                files.setdefault((kind, int(number)), []).append(path)
        return dict(sorted(files.items()))

    @cached_property
    def _metrics(self) -> dict[int, Row]:
        rows = dict[int, Row]()
        for row in reader.read_lines(self.path / "metrics.jsonl"):
            if (number := pick(row, "step", float)) is not None:  # summaries have no step
                metrics = reader.pick_numbers({"": row}, "")
                rows.setdefault(int(number), {}).update({_rename(name): value for name, value in metrics.items()})
        return dict(sorted(rows.items()))

    def _read_records(self, step: Step) -> list[tuple[str, list[Row], list[Row]]]:
        if step not in self._groups:
            self._groups[step] = [group for path in self._files[step] for group in _read_file(path)]
        return self._groups[step]

    @override
    def list_steps(self) -> Sequence[Step]:
        return list(self._files)

    @override
    def read_groups(self, step: Step) -> Sequence[Row]:
        rows = list[Row]()
        for position, (name, records, replies) in enumerate(self._read_records(step)):
            members, is_training = [_read_member(record) for record in records], step[0] == "step"
            tags, is_mixed = pick_list(records[0], "tags"), len({member["reward"] for member in members}) > 1
            fields: Row = {"env": str(tags[0]) if is_training and tags else name, "taught": is_training and is_mixed}
            fields["reason"] = "equal rewards" if is_training and not is_mixed else None
            fields["prompt"] = [message for reply in replies if not reply["reward"] for message in reply["messages"]]
            task = f"{step[1]}/{pick(records[0], 'group_idx', str)}"  # the folder does not name tasks
            rows.append(reader.make_group(position, task=task, members=members, **fields))
        return rows

    @override
    def read_episode(self, step: Step, position: int, member: int) -> tuple[Sequence[Row], Row, str | None]:
        _, records, replies = self._read_records(step)[position]
        steps = [pick_rows(record, "steps") for record in records]
        rewards = [f"{pick(turns[0], 'reward', float) or 0:.3f}" if len(turns) == 1 else None for turns in steps]
        same = [reply["messages"] for reply in replies if reply["reward"] and reply["reward"] == rewards[member]]
        messages = [*same, *(list[Row]() for _ in records)][rewards[:member].count(rewards[member])]
        turns = [
            reader.make_turn(messages if index == 0 else [], index=index, reward=pick(turn, "reward", float))
            for index, turn in enumerate(steps[member])
        ]
        return turns, {"logs": [turn.get("logs") for turn in steps[member]]}, None

    @override
    def metrics(self) -> Row:
        names = dict.fromkeys(name for row in self._metrics.values() for name in row if name != "step")
        columns = {name: [row.get(name) for row in self._metrics.values()] for name in names}
        return {"step": list(self._metrics), "metrics": columns}

    @override
    def run(self) -> Row:
        config, rows = reader.read_json(self.path / "config.json"), list(self._metrics.values())
        reward, evaluation = ([row[name] for row in rows if name in row] for name in (_REWARD, _EVALUATION))
        done = rows[-1].get("progress/done_frac") if rows else None
        ends = {"metric": "reward", "start": evaluation[0], "now": evaluation[-1]} if evaluation else None
        names, paths = [f"env/all/total_{side}_tokens" for side in ("ob", "ac")], ("sampler_path", "state_path")
        checkpoints = [
            {"step": pick(each, "batch", int), "expires": None, "path": next(filter(None, map(each.get, paths)), None)}
            for each in reader.read_lines(self.path / "checkpoints.jsonl")
        ]
        return self.make_run(
            self.path / "metrics.jsonl",
            status="completed" if done == 1 else None,
            step=max(self._metrics, default=-1) + 1,
            steps=round((max(self._metrics) + 1) / done) if done else None,
            model=pick(config, "model_name", str),
            reward=[reward[0], reward[-1]] if reward else None,
            evaluation=ends,
            tokens=sum(row.get(name, 0) for row in rows for name in names),
            config=reader.list_settings(config),
            checkpoints=checkpoints,
        )


def _read_file(path: Path) -> Iterator[tuple[str, list[Row], list[Row]]]:
    name, groups = path.name.removesuffix(_SUFFIX), dict[str | None, list[Row]]()
    for record in reader.read_lines(path):
        groups.setdefault(pick(record, "group_idx", str), []).append(record)
    logs = list(_find_groups(reader.read_json(path.with_name(f"{name}_logtree.json")).get("root")))
    for records in groups.values():
        turns = [turn for record in records for turn in pick_rows(record, "steps")]
        lengths = [pick(turn, length, str) for turn in turns for length in ("ob_len", "ac_len")]
        yield name, records, next((replies for log_lengths, replies in logs if log_lengths == lengths), list[Row]())


def _rename(name: str) -> str:
    """Return rlkit's name of a metric."""
    name = re.sub(r"^(\w+)/env/all/", r"eval/\1/", name).replace("/reward/total", "/reward/mean")
    return name.replace("/by_group/frac_", "/groups/").replace("optim/lr", "optim/learning_rate")


def _read_member(record: Row) -> Row:
    turns, metrics = pick_rows(record, "steps"), dict[str, float]()
    for each in (*turns, {"metrics": pick_object(record, "trajectory_metrics")}):
        metrics |= reader.pick_numbers(each, "metrics")
    version = pick(record, "sampling_client_step", int)
    return reader.make_member(
        error=None,
        is_truncated=any(name.startswith(_LIMITS) for name in metrics),
        reward=pick(record, "total_reward", float),
        metrics=metrics,
        turns=len(turns),
        tokens=sum(pick(turn, "ac_len", int) or 0 for turn in turns),
        versions=None if version is None else [version, version],
    )


def _find_groups(node: object) -> Iterator[tuple[list[str | None], list[Row]]]:
    """Yield, for each group of a log, the lengths of all turns, and the conversations with their rewards.

    Conversations that no reward follows are one reply without a reward.
    """
    children = pick_rows(node, "children")
    if not (children and pick_list(children[0], "children") == ["Group Rollout"]):
        for child in children:
            yield from _find_groups(child)
        return
    lengths, replies, messages = list[str | None](), list[Row](), list[Row]()
    for name, value in _list_entries(node):
        if name == "conversation":
            messages += [reader.make_message(message) for message in pick_rows({"": value}, "")]
        elif name == "reward":
            replies.append({"reward": value, "messages": messages})
            messages = []
        elif name in ("ob_len", "ac_len"):
            lengths.append(str(value))
    yield lengths, [*replies, {"reward": None, "messages": messages}]


def _list_entries(node: object) -> Iterator[tuple[str, Any]]:
    """Yield the conversations and the rows of tables of a log, in its order."""
    if pick(node, "data.type", str) == "conversation":
        yield "conversation", pick_list(node, "data.messages")
    children = pick_rows(node, "children")
    texts = ["".join(each for each in pick_list(child, "children") if isinstance(each, str)) for child in children]
    if pick(node, "tag", str) == "tr" and len(texts) == 2:
        yield html.unescape(texts[0]), html.unescape(texts[1])
    for child in children:
        yield from _list_entries(child)
