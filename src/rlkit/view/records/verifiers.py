"""Results folders of verifiers: `traces.jsonl` since version 0.4, `results.jsonl` with `metadata.json` before.

Invariant: rollouts of the same task and group, in the same step, are one group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import override

from rlkit._util.files import json_lines
from rlkit._util.files.json_fields import pick, pick_numbers, pick_object, pick_rows
from rlkit.errors import UsageError
from rlkit.view.records.reader import LogGroup, LogReader, Row, Step, make_member, make_message, make_turn, split_turns

_TASK_NAMES = ("task.data.id", "task.data.name", "task.data.idx", "task.key", "example_id")
_TIMES = ("timing.start", "timing.agent.end", "timing.scoring.end")
_INFO = ("answer", "info", "rewards", "stop_condition")


class VerifiersReader(LogReader):
    """Reader of a results folder."""

    kind = "verifiers"

    @property
    def _results(self) -> Path:
        traces = self.path / "traces.jsonl"
        return traces if traces.exists() else self.path / "results.jsonl"

    @cached_property
    def _config(self) -> Row:
        paths = [*sorted(self.path.glob("configs/resolved/*.json")), self.path / "metadata.json"]
        return json_lines.read_object(paths[0]) if paths[0].exists() else {}

    @override
    def load_groups(self) -> Mapping[Step, Sequence[LogGroup]]:
        """Return the rollouts by step, those of the same environment, task and group together."""
        steps = defaultdict[Step, dict[tuple[str, str, str], LogGroup]](dict)
        for record in json_lines.read_lines(self._results):
            kind = "step" if pick(record, "run.work.type", str) == "train" else "evaluation"
            env = pick(record, "env.id", str) or pick(self._config, "env_id", str) or self.path.name
            task = next((text for name in _TASK_NAMES if (text := pick(record, name, str))), "")
            groups = steps[kind, pick(record, "run.work.step", int) or 0]
            key = (env, task, pick(record, "group.id", str) or "")
            groups.setdefault(key, LogGroup(env, task, [])).records.append(record)
        return {step: list(groups.values()) for step, groups in sorted(steps.items())}

    @override
    def show_member(self, record: Row) -> Row:
        return _show_rollout(record) if "traces" in record else _show_result(record)

    @override
    def show_episode(self, record: Row) -> Row:
        traces = pick_rows(record, "traces")
        info = {name: holder[name] for holder in (record, *traces) for name in _INFO if holder.get(name)}
        if "traces" in record:
            turns, info["task"] = _read_turns(self._results, traces), pick_object(record, "task.data")
        else:
            turns = split_turns([*_read_messages(record, "prompt"), *_read_messages(record, "completion")])
        return {"turns": turns, "info": info, "error": _read_error(record)}

    @override
    def run(self) -> Row:
        config, groups = self._config, [group for step in self.groups for group in self.read_groups(step)]
        members = pick(config, "num_rollouts", float) or pick(config, "rollouts_per_example", float)
        sizes = [len(group["members"]) for group in groups]
        count = max(1, pick(config, "num_examples", float) or 1)  # -1 means all
        is_complete = members is not None and len(sizes) >= count and min(sizes) >= members
        mean = self.average_reward(groups)
        return self.make_run(
            self._results,
            status="completed" if is_complete else None,
            step=max((number for _, number in self.groups), default=0),
            model=pick(config, "model", str),
            envs=sorted({group["env"] for group in groups}),
            evaluation={"metric": "reward", "start": None, "now": mean},
            tokens=sum(member["tokens"] or 0 for group in groups for member in group["members"]),
            config=config,
            versions={"verifiers": pick(config, "version_info.vf_version", str)},
        )


def _show_rollout(record: Row) -> Row:
    """Return an episode of version 0.4; with several agents, its reward is the mean of theirs."""
    traces = pick_rows(record, "traces")
    calls = [call for trace in traces for call in pick_rows(trace, "calls")]
    rewards, metrics = list[float](), dict[str, float]()
    for trace in traces:
        scores = {name: pick_numbers(score, "") for name, score in pick_object(trace, "rewards").items() if score}
        if scores:
            rewards.append(sum(score.get("score", 0) * score.get("weight", 1) for score in scores.values()))
        metrics |= pick_numbers(trace, "metrics")
        metrics |= {name: score.get("score", 0) for name, score in scores.items()}
    times = [time for trace in traces for name in _TIMES if (time := pick(trace, name, float))]
    stops = [pick(trace, "stop_condition", str) or "" for trace in traces]
    is_cut = any(call.get("finish_reason") == "length" for call in calls)
    versions = [pick(record, f"run.work.policy.{name}", int) for name in ("start", "end")]
    return make_member(
        error=None if record.get("ok") is True else _read_error(record) or "it was not completed",
        is_truncated=is_cut or record.get("is_timeout") is True or any(stop.startswith("max_") for stop in stops),
        reward=fmean(rewards) if rewards else None,
        metrics=metrics,
        cut=is_cut,
        turns=sum(pick(call, "node", int) is not None for call in calls),
        tokens=pick(record, "num_output_tokens", float),
        seconds=max(times) - min(times) if times else None,
        versions=None if None in versions else versions,
    )


def _show_result(record: Row) -> Row:
    """Return an episode of a version before 0.4."""
    return make_member(
        error=_read_error(record),
        is_truncated=record.get("is_truncated") is True,
        reward=pick(record, "reward", float),
        metrics=pick_numbers(record, "metrics"),
        turns=sum(message["role"] == "assistant" for message in _read_messages(record, "completion")),
        tokens=pick(record, "token_usage.output_tokens", float),
        seconds=pick(record, "timing.total", float),
    )


def _read_error(record: Row) -> str | None:
    lines = [pick(record, "error.error_chain_repr", str), pick(record, "error", str)]
    for holder in (record, *pick_rows(record, "traces")):
        for error in pick_rows(holder, "errors"):
            lines += [f"{error.get('type')}: {error.get('message')}", pick(error, "traceback", str)]
    return "\n".join(filter(None, lines)) or None


def _read_messages(record: Row, name: str) -> list[Row]:
    """Return the messages of a prompt or completion, which is a list, or a text."""
    if text := pick(record, name, str):
        return [{"role": "user" if name == "prompt" else "assistant", "content": text}]
    return [make_message(message) for message in pick_rows(record, name)]


def _read_turns(path: Path, traces: Sequence[Row]) -> list[Row]:
    """Return a turn for each reply in the agents' graphs of messages, with the messages since the turn above it."""
    turns = list[Row]()
    for trace in traces:
        agent = {"name": pick(trace, "agent.name", str)} if len(traces) > 1 else {}
        calls = {pick(call, "node", int): call for call in pick_rows(trace, "calls")}
        branches, messages, above = list[tuple[list[Row], int | None]](), list[Row](), None
        for index, node in enumerate(pick_rows(trace, "nodes")):
            parent = pick(node, "parent", int)
            if parent is not None and parent not in range(index):
                raise UsageError(f"{path} is damaged: message {index} follows message {parent}")
            before, above = ([], None) if parent is None else branches[parent]
            messages = [*before, {**make_message(pick_object(node, "message")), **agent}]
            if node.get("sampled") is True:
                call = calls.get(index)
                start, end = (pick(call, f"time.{name}", float) for name in ("start", "end"))
                seconds = end - start if end and start else None
                stop = pick(call, "finish_reason", str)
                turns.append(make_turn(messages, index=len(turns), parent=above, stop=stop, seconds=seconds))
                messages, above = list[Row](), len(turns) - 1
            branches.append((messages, above))
        if messages:  # after the last reply
            turns.append(make_turn(messages, index=len(turns), parent=above))
    return turns
