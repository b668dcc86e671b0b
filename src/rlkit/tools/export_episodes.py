# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""Export of a run's episodes as logs of inspect_ai and as a database of inspect_scout.

Invariant: an exported folder is complete, and free of secrets, like the rollouts that trackers show. Only an episode
with a reward has a score.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from rlkit.config.loading.run_config import find_run
from rlkit.errors import UsageError
from rlkit.tools.export import create_folder, resolve_directory
from rlkit.trackers.recorded_run import RecordedRollout, RecordedTurn, read_rollouts, read_run


def export_episodes(run: str, directory: Path, *, note: Callable[[str], None] = lambda message: None) -> int:
    """Write `logs`, a log of inspect per step and environment, and the database `transcripts`; return the count.

    Raises:
        UsageError: the run does not exist, has no episodes or is damaged, or the directory cannot be created.
    """
    source, directory, count = read_run(find_run(run).resolve()), resolve_directory(directory), 0
    patterns = [f"{split}/step=*/*.parquet" for split in ("episodes", "evaluations")]
    paths = [path for pattern in patterns for path in source.directory.glob(pattern)]
    if not paths:
        raise UsageError(f"{source.name} has no episodes to export: it has not finished a step")
    with create_folder(directory) as folder:
        for name in ("logs", "transcripts"):
            (folder / name).mkdir(parents=True)
        for number, path in enumerate(sorted(paths), 1):
            note(f"exporting {path.parent.parent.name}, {path.parent.name} ({number} of {len(paths)})")
            count += _export_table(path, folder, {"run": source.name, "model": source.model})
    return count


def _export_table(path: Path, folder: Path, run: Mapping[str, str]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    split, step = path.parts[-3:-1]
    origin = {**run, "split": split, "step": int(step.removeprefix("step="))}
    created = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    epochs, samples = Counter[tuple[str, str]](), defaultdict[str, list[dict[str, Any]]](list)
    for rollout in read_rollouts(path):
        epochs[rollout.env, rollout.task] += 1
        uuid = str(uuid5(NAMESPACE_URL, f"{path.as_uri()}#{rollout.env},{rollout.draw},{rollout.member}"))
        sample = _make_sample(rollout, model=run["model"], epoch=epochs[rollout.env, rollout.task], uuid=uuid)
        samples[rollout.env].append(sample)
    for env, env_samples in samples.items():
        stem = f"{env}-{split}-{step.replace('=', '-')}"
        log = _make_log(env, env_samples, {"created": created, "eval_id": env_samples[0]["uuid"], "metadata": origin})
        (folder / "logs" / f"{created.replace(':', '-')}_{stem}_{run['run']}.json").write_text(json.dumps(log))
    source = {"source_type": "rlkit", "source_id": run["run"], "source_uri": str(path), "date": created, **origin}
    rows = [{**source, **_make_row(env, sample)} for env in samples for sample in samples[env]]
    if rows:
        schema = pa.Table.from_pylist(rows).schema
        for name in ("score", "error"):  # the type of a column without values would be unknown
            schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "transcripts" / f"{split}-{step}.parquet")
    return len(rows)


def _make_sample(rollout: RecordedRollout, *, model: str, epoch: int, uuid: str) -> dict[str, Any]:
    """Return a rollout as a sample of inspect; `epoch` numbers the rollouts of its task."""
    messages, usage = _read_turns(rollout.turns, model)
    stop = "max_tokens" if rollout.turns and rollout.turns[-1].stop == "length" else "stop"
    metrics = {"reward_metric" if name == "reward" else name: value for name, value in rollout.metrics.items()}
    scores = {"reward": rollout.reward, **metrics} if rollout.reward is not None else {}
    error = {"message": rollout.error, "traceback": "", "traceback_ansi": ""} if rollout.error else None
    return {
        "id": rollout.task,
        "epoch": epoch,
        "uuid": uuid,
        "input": messages[0]["content"] if messages else "",
        "target": "",
        "messages": messages,
        "output": {"model": model, "choices": [{"message": messages[-1], "stop_reason": stop}] if messages else []},
        "scores": {name: {"value": value} for name, value in scores.items()},
        "metadata": {name: getattr(rollout, name) for name in ("draw", "member", "status", "info")},
        "model_usage": {model: usage},
        "total_time": rollout.seconds,
        "error": error,
    }


def _read_turns(turns: Sequence[RecordedTurn], model: str) -> tuple[list[dict[str, Any]], Mapping[str, int]]:
    """Return the messages of turns, with a note before a turn that does not extend the one before, and the usage."""
    messages, lengths, inputs = list[dict[str, Any]](), list[int](), 0
    for index, turn in enumerate(turns):
        metadata = {"turn": index, "parent": turn.parent, "version": turn.version, "reward": turn.reward}
        if index and turn.parent != index - 1:
            relation = "begins a new conversation" if turn.parent is None else f"continues turn {turn.parent}"
            messages.append({"role": "system", "content": f"[turn {index} {relation}]", "metadata": metadata})
        if turn.prompt:
            messages.append({"role": "user", "content": turn.prompt, "metadata": metadata})
        reply = {"role": "assistant", "content": turn.completion, "metadata": metadata}
        origin = {"source": "input"} if turn.is_demonstration else {"source": "generate", "model": model}
        messages.append({**reply, **origin})
        prompt = turn.tokens[0] + (0 if turn.parent is None else lengths[turn.parent])
        lengths.append(prompt + turn.tokens[1])
        inputs += prompt + turn.tokens[1] * turn.is_demonstration
    outputs = sum(turn.tokens[1] for turn in turns if not turn.is_demonstration)
    return messages, {"input_tokens": inputs, "output_tokens": outputs, "total_tokens": inputs + outputs}


def _make_log(env: str, samples: Sequence[Mapping[str, Any]], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return samples of an environment as a log of inspect, with the means of their scores."""
    values = defaultdict[str, list[float]](list)
    for sample in samples:
        for name, score in sample["scores"].items():
            values[name].append(score["value"])
    means = {name: {"mean": {"name": "mean", "value": fmean(numbers)}} for name, numbers in values.items()}
    scores = [{"name": name, "scorer": name, "metrics": metrics} for name, metrics in means.items()]
    end = datetime.fromisoformat(spec["created"])
    start = end - timedelta(seconds=max(sample["total_time"] for sample in samples))
    completed, origin = sum(sample["error"] is None for sample in samples), spec["metadata"]
    task = {"task": env, "task_id": env, "dataset": {"name": env, "samples": len(samples)}}
    return {
        "version": 2,
        "status": "success",
        "eval": {**spec, **task, "run_id": origin["run"], "model": origin["model"], "config": {}},
        "plan": {},
        "results": {"total_samples": len(samples), "completed_samples": completed, "scores": scores},
        # Before the samples, because `inspect view` reads the times there.
        "stats": {"started_at": start.isoformat(timespec="seconds"), "completed_at": spec["created"]},
        "samples": samples,
    }


def _make_row(env: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample as a row of scout's database; a column that its schema lacks is metadata."""
    (usage,) = sample["model_usage"].values()
    scores = {name: score["value"] for name, score in sample["scores"].items()}
    return {
        "transcript_id": sample["uuid"],
        "task_set": env,
        "task_id": sample["id"],
        "task_repeat": sample["epoch"],
        "score": json.dumps(scores) if scores else None,
        "message_count": len(sample["messages"]),
        "total_time": sample["total_time"],
        "total_tokens": usage["total_tokens"],
        "error": sample["error"] and sample["error"]["message"],
        "messages": json.dumps(sample["messages"]),
        **{**sample["metadata"], "info": json.dumps(sample["metadata"]["info"])},
    }
