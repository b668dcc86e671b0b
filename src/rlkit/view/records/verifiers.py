"""Results folders of verifiers: `traces.jsonl` since version 0.4, `results.jsonl` with `metadata.json` before.

Invariant: rollouts of the same task and group, in the same step, are one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import override

from rlkit.errors import UsageError
from rlkit.view.records import reader
from rlkit.view.records.reader import LogReader, Row, Step, pick, pick_numbers, pick_object, pick_rows

_TASK_NAMES = ("task.data.id", "task.data.name", "task.data.idx", "task.key", "example_id")


class VerifiersReader(LogReader):
    """Reader of a results folder."""

    kind = "verifiers"

    @cached_property
    def _config(self) -> Row:
        return reader.read_json([*sorted(self.path.glob("configs/resolved/*.json")), self.path / "metadata.json"][0])

    @cached_property
    def _steps(self) -> dict[Step, dict[tuple[str, ...], list[Row]]]:
        steps = dict[Step, dict[tuple[str, ...], list[Row]]]()
        for record in reader.read_lines(results_file(self.path)):
            kind = "step" if pick(record, "run.work.type", str) == "train" else "evaluation"
            env = pick(record, "env.id", str) or pick(self._config, "env_id", str) or self.path.name
            task = next((text for name in _TASK_NAMES if (text := pick(record, name, str))), "")
            groups = steps.setdefault((kind, pick(record, "run.work.step", int) or 0), {})
            groups.setdefault((env, task, pick(record, "group.id", str) or ""), []).append(record)
        return dict(sorted(steps.items()))

    @override
    def list_steps(self) -> Sequence[Step]:
        return list(self._steps)

    @override
    def read_groups(self, step: Step) -> Sequence[Row]:
        rows = list[Row]()
        for position, ((env, task, _), records) in enumerate(self._steps[step].items()):
            members = [_read_rollout(record) if "traces" in record else _read_result(record) for record in records]
            rows.append(reader.make_group(position, env=env, task=task, members=members))
        return rows

    @override
    def read_episode(self, step: Step, position: int, member: int) -> tuple[Sequence[Row], Row, str | None]:
        record = list(self._steps[step].values())[position][member]
        traces, names = pick_rows(record, "traces"), ("answer", "info", "rewards", "stop_condition")
        info = {name: each[name] for each in (record, *traces) for name in names if each.get(name)}
        if "traces" in record:
            info["task"] = pick_object(record, "task.data")
            return _read_turns(self.path, traces), info, _read_error(record)
        messages = [*_read_messages(record, "prompt", "user"), *_read_messages(record, "completion", "assistant")]
        return reader.split_turns(messages), info, _read_error(record)

    @override
    def run(self) -> Row:
        config, groups = self._config, [group for step in self._steps for group in self.read_groups(step)]
        size = pick(config, "num_rollouts", float) or pick(config, "rollouts_per_example", float)
        sizes, count = [len(group["members"]) for group in groups], pick(config, "num_examples", float) or 1
        mean = reader.average_reward(groups)
        return self.make_run(
            results_file(self.path),
            status="completed" if size and len(sizes) >= count and min(sizes) >= size else None,
            step=max((number for _, number in self._steps), default=0),
            model=pick(config, "model", str),
            envs=sorted({group["env"] for group in groups}),
            evaluation={"metric": "reward", "start": mean, "now": mean},
            tokens=sum(member["tokens"] or 0 for group in groups for member in group["members"]),
            config=reader.list_settings(config),
            versions={"verifiers": pick(config, "version_info.vf_version", str)},
        )


def results_file(path: Path) -> Path:
    """Return the file of a results folder that holds the rollouts."""
    return path / ("traces.jsonl" if (path / "traces.jsonl").exists() else "results.jsonl")


def _read_rollout(record: Row) -> Row:
    """Return an episode of version 0.4; with several agents, its reward is the mean of theirs."""
    rewards, times, metrics = list[float](), list[float](), dict[str, float]()
    is_limited = record.get("is_timeout") is True
    calls = [call for trace in pick_rows(record, "traces") for call in pick_rows(trace, "calls")]
    for trace in pick_rows(record, "traces"):
        scores = {name: pick_numbers({"": score}, "") for name, score in pick_object(trace, "rewards").items() if score}
        rewards += [sum(each.get("score", 0) * each.get("weight", 1) for each in scores.values())] if scores else []
        metrics |= {**pick_numbers(trace, "metrics"), **{name: each.get("score", 0) for name, each in scores.items()}}
        is_limited |= (pick(trace, "stop_condition", str) or "").startswith("max_")
        times += filter(None, (pick(trace, f"timing.{name}", float) for name in ("start", "agent.end", "scoring.end")))
    is_cut = any(call.get("finish_reason") == "length" for call in calls)
    versions = [pick(record, f"run.work.policy.{name}", int) for name in ("start", "end")]
    return reader.make_member(
        error=None if record.get("ok") is True else _read_error(record) or "it was not completed",
        is_truncated=is_limited or is_cut,
        reward=fmean(rewards) if rewards else None,
        metrics=metrics,
        cut=is_cut,
        turns=sum(pick(call, "node", int) is not None for call in calls),
        tokens=pick(record, "num_output_tokens", float),
        seconds=max(times) - min(times) if times else None,
        versions=None if None in versions else versions,
    )


def _read_result(record: Row) -> Row:
    """Return an episode of a version before 0.4."""
    return reader.make_member(
        error=_read_error(record),
        is_truncated=record.get("is_truncated") is True,
        reward=pick(record, "reward", float),
        metrics=pick_numbers(record, "metrics"),
        turns=sum(message["role"] == "assistant" for message in _read_messages(record, "completion", "assistant")),
        tokens=pick(record, "token_usage.output_tokens", float),
        seconds=pick(record, "timing.total", float),
    )


def _read_error(record: Row) -> str | None:
    lines = [pick(record, "error.error_chain_repr", str), pick(record, "error", str)]
    for error in (error for each in (record, *pick_rows(record, "traces")) for error in pick_rows(each, "errors")):
        lines += [f"{error.get('type')}: {error.get('message')}", pick(error, "traceback", str)]
    return "\n".join(filter(None, lines)) or None


def _read_messages(record: Row, name: str, role: str) -> list[Row]:
    if text := pick(record, name, str):
        return [{"role": role, "content": text}]
    return [reader.make_message(message) for message in pick_rows(record, name)]


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
            messages = [*before, {**reader.make_message(pick_object(node, "message")), **agent}]
            if node.get("sampled") is True:
                start, end = (pick(calls.get(index), f"time.{name}", float) for name in ("start", "end"))
                fields = {"parent": above, "stop": pick(calls.get(index), "finish_reason", str)}
                seconds = end - start if end and start else None
                turns.append(reader.make_turn(messages, index=len(turns), **fields, seconds=seconds))
                messages, above = list[Row](), len(turns) - 1
            branches.append((messages, above))
        if messages:  # after the last reply
            turns.append(reader.make_turn(messages, index=len(turns), parent=above))
    return turns
