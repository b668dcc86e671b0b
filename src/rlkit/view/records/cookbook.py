"""Log folders of tinker-cookbook: `metrics.jsonl`, `config.json`, and the rollouts of each iteration.

Invariant: an episode shows a conversation of the rollout log only if their rewards are equal. The log names no member,
so that members of a group with equal rewards may show each other's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import override

from rlkit._util.files import json_lines
from rlkit._util.files.json_fields import pick, pick_list, pick_numbers, pick_object, pick_rows
from rlkit.metrics.run_summary import find_ends
from rlkit.view.records.reader import LogGroup, LogReader, Row, Step, make_member, make_message, make_turn

_CONVERSATION = "conversation"  # rlkit's own field of a record
_SUFFIX = "_rollout_summaries.jsonl"
_REWARD, _EVALUATION = "env/all/reward/mean", "eval/test/reward/mean"
_TOKENS = ("env/all/total_ob_tokens", "env/all/total_ac_tokens")
_STEPS_MAX = 1 << 53  # a greater number is no number of steps, and may overflow a float
_LIMITS = ("max_tokens_reached", "context_overflow", "stop/max_", "stop/rollout_timeout")


class CookbookReader(LogReader):
    """Reader of a log folder. An iteration's training rollouts are a step, and its other rollouts an evaluation."""

    kind = "cookbook"

    @cached_property
    def _files(self) -> dict[Step, list[Path]]:
        files = defaultdict[Step, list[Path]](list)
        for path in sorted(self.path.glob(f"iteration_[0-9]*/*{_SUFFIX}")):
            number = path.parent.name.removeprefix("iteration_")
            if number.isdecimal():
                files["step" if path.name == f"train{_SUFFIX}" else "evaluation", int(number)].append(path)
        return dict(sorted(files.items()))

    @cached_property
    def _metrics(self) -> dict[int, dict[str, float]]:
        """Metrics by step, with rlkit's names."""
        rows = defaultdict[int, dict[str, float]](dict)
        for row in json_lines.read_lines(self.path / "metrics.jsonl"):
            if (step := pick(row, "step", int)) is not None:  # summaries have no step
                rows[step] |= {_rename(name): value for name, value in pick_numbers(row, "").items() if name != "step"}
        return dict(sorted(rows.items()))

    @override
    def list_steps(self) -> Sequence[Step]:
        return list(self._files)

    @override
    def load_groups(self) -> Mapping[Step, Sequence[LogGroup]]:
        return _Groups(self._files)

    @override
    def show_member(self, record: Row) -> Row:
        turns, metrics = pick_rows(record, "steps"), dict[str, float]()
        for turn in turns:
            metrics |= pick_numbers(turn, "metrics")
        metrics |= pick_numbers(record, "trajectory_metrics")
        version = pick(record, "sampling_client_step", int)
        return make_member(
            error=None,
            is_truncated=any(name.startswith(_LIMITS) for name in metrics),
            reward=pick(record, "total_reward", float),
            metrics=metrics,
            turns=len(turns),
            tokens=sum(pick(turn, "ac_len", int) or 0 for turn in turns),
            versions=None if version is None else [version, version],
        )

    @override
    def show_episode(self, record: Row) -> Row:
        steps, turns = pick_rows(record, "steps"), list[Row]()
        for index, step in enumerate(steps):
            messages = pick_rows(record, _CONVERSATION) if index == 0 else []
            turns.append(make_turn(messages, index=index, reward=pick(step, "reward", float)))
        return {"turns": turns, "info": {"logs": [step.get("logs") for step in steps]}, "error": None}

    @override
    def read_metrics(self) -> Mapping[int, Mapping[str, float | None]]:
        scores = self.score_steps([step for step in self._files if step[0] == "evaluation"])
        steps = sorted(scores.keys() | self._metrics.keys())
        return {step: {**scores.get(step, {}), **self._metrics.get(step, {})} for step in steps}

    @override
    def run(self) -> Row:
        config, rows = json_lines.read_object(self.path / "config.json"), list(self._metrics.values())
        reward, scores = (find_ends([row.get(name) for row in rows]) for name in (_REWARD, _EVALUATION))
        last_step = max(self._metrics, default=-1)
        done = rows[-1].get("progress/done_frac") if rows else None
        steps = min(last_step + 1, _STEPS_MAX) / done if done else _STEPS_MAX
        checkpoints = list[Row]()
        for line in json_lines.read_lines(self.path / "checkpoints.jsonl"):
            path = pick(line, "sampler_path", str) or pick(line, "state_path", str)
            checkpoints.append({"step": pick(line, "batch", int), "path": path, "expires": None})
        return self.make_run(
            self.path / "metrics.jsonl",
            status="completed" if done == 1 else None,
            step=last_step + 1,
            steps=round(steps) if abs(steps) < _STEPS_MAX else None,
            model=pick(config, "model_name", str),
            reward=reward,
            evaluation=scores and {"metric": "reward", "start": scores[0], "now": scores[1]},
            tokens=sum(row.get(name, 0) for row in rows for name in _TOKENS),
            config=config,
            checkpoints=checkpoints,
        )


class _Groups(dict[Step, Sequence[LogGroup]]):
    """Groups of the steps that were asked for, read from their files."""

    def __init__(self, files: Mapping[Step, Sequence[Path]]) -> None:
        super().__init__()
        self._files = files

    def __missing__(self, step: Step) -> Sequence[LogGroup]:
        self[step] = [group for path in self._files[step] for group in _load_file(path, step)]
        return self[step]


def _rename(name: str) -> str:
    """Return rlkit's name of a metric."""
    name = re.sub(r"^(\w+)/env/all/", r"eval/\1/", name).replace("/reward/total", "/reward/mean")
    return name.replace("/by_group/frac_", "/groups/").replace("optim/lr", "optim/learning_rate")


def _load_file(path: Path, step: Step) -> Iterator[LogGroup]:
    """Yield the groups of a file; each record gets its conversation from the log whose turns have the same lengths."""
    name, groups = path.name.removesuffix(_SUFFIX), defaultdict[str, list[Row]](list)
    for record in json_lines.read_lines(path):
        groups[pick(record, "group_idx", str) or ""].append(record)
    tree_path = path.with_name(f"{name}_logtree.json")
    logs = _read_logs(pick_object(json_lines.read_object(tree_path), "root")) if tree_path.exists() else []
    for number, records in groups.items():
        turns = [pick_rows(record, "steps") for record in records]
        lengths = [pick(turn, length, str) for turn in chain(*turns) for length in ("ob_len", "ac_len")]
        log = next((log for log in logs if log.lengths == lengths), _GroupLog())
        for record, steps in zip(records, turns, strict=True):
            # Only the reward of a single turn is in the log; each conversation is shown once.
            same = log.replies[f"{pick(steps[0], 'reward', float) or 0:.3f}"] if len(steps) == 1 else []
            record[_CONVERSATION] = same.pop(0) if same else []
        env, task = name.removeprefix("eval_"), f"{step[1]}/{number}"  # the folder does not name tasks
        fields: Row = {"prompt": log.messages}
        if step[0] == "step":
            env = next(map(str, pick_list(records[0], "tags")), name)
            is_mixed = len({pick(record, "total_reward", float) for record in records}) > 1
            fields |= {"taught": is_mixed, "reason": None if is_mixed else "equal rewards"}
        yield LogGroup(env, task, records, fields)


@dataclass
class _GroupLog:
    """Log of a group: the lengths of its prompts and replies, and its conversations by their rewards."""

    lengths: list[str] = field(default_factory=list[str])
    replies: defaultdict[str, list[list[Row]]] = field(default_factory=lambda: defaultdict[str, list[list[Row]]](list))
    messages: list[Row] = field(default_factory=list[Row])  # those that no reward follows


def _read_logs(root: Row) -> list[_GroupLog]:
    """Return the logs of the groups in the tree of a page; each follows its heading."""
    logs = [_GroupLog()]  # the first has what is before all headings
    for node in _list_nodes(root):
        match node:
            case {"children": ["Group Rollout"]}:
                logs.append(_GroupLog())
            case {"data": {"type": "conversation"}}:
                logs[-1].messages += map(make_message, pick_rows(node, "data.messages"))
            case {"tag": "tr", "children": [{"children": ["reward"]}, {"children": [str(reward)]}]}:
                logs[-1].replies[reward].append(logs[-1].messages)
                logs[-1].messages = []
            case {"tag": "tr", "children": [{"children": ["ob_len" | "ac_len"]}, {"children": [str(length)]}]}:
                logs[-1].lengths.append(length)
            case _:
                pass
    return logs[1:]


def _list_nodes(node: Row) -> Iterator[Row]:
    """Yield a node and all below it, from the top of the page to its end."""
    yield node
    for child in pick_rows(node, "children"):
        yield from _list_nodes(child)
