# pyarrow has no types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportUnknownParameterType=false, reportMissingTypeStubs=false
"""updates/000012.parquet: the training sequences of a step, one row per group.

    duckdb.sql("select step, env, task, estimator, baseline from 'RUN/updates/*.parquet'")

Invariant: a file holds the advantage of each token that the step trained on, as it was sent, and together with the
step's table of episodes the trainer's log-probability, as it was received. Its rows have the order of the groups there.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rlkit._util import files
from rlkit._util.threads import in_thread, start_task
from rlkit.algorithms.datums import PreparedGroup, UpdateResult
from rlkit.algorithms.estimator import Estimator
from rlkit.errors import UsageError
from rlkit.token_records.list_columns import make_lists, row_ends, split_lists
from rlkit.types import Bools, Floats

_NUMBERS = [f"sequences.list.element.{name}.list.element" for name in ("advantages", "logprob_bits")]
"""Columns with a number for each token: compressed by bytes, because a dictionary doubles numbers that all differ."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSequence:
    """A training sequence."""

    position: int  # its place among all sequences of the step
    member: int  # its episode in the group
    turn: int  # index of its last turn in the episode; it holds this turn and all turns before it in its segment
    mask: Bools  # [N] bool, True for targets that were trained
    advantages: Floats  # [M] float32 for the M trained targets, after shaping, penalties and normalisation
    # [M] int32, the bits in which the trainer's log-probabilities differ from the sampler's: they are few and compress
    # well. Tables of earlier releases have the trainer's log-probabilities themselves, as float32.
    logprob_bits: NDArray[np.int32] | Floats

    def find_logprobs(self, sampler_logprobs: Floats) -> Floats:
        """Return the trainer's log-probabilities before the optimiser step, [M] float32.

        Args:
            sampler_logprobs: the sampler's log-probabilities of the trained targets, [M] float32.
        """
        if self.logprob_bits.dtype == np.float32:
            return cast("Floats", self.logprob_bits)
        return (sampler_logprobs.view(np.int32) ^ cast("NDArray[np.int32]", self.logprob_bits)).view(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedUpdate:
    """A group of a step, with its training sequences."""

    draw: int
    env: str
    estimator: str  # title of the advantage estimator
    baseline: float | None  # reward whose advantage is 0; None if the advantages are no straight line over the rewards
    sequences: Sequence[RecordedSequence]


def update_path(directory: Path, step: int) -> Path:
    """Return the path of the training sequences of a step."""
    return directory / "updates" / f"{step:06d}.parquet"


def record_update(
    directory: Path,
    step: int,
    groups: Sequence[PreparedGroup],
    result: UpdateResult | None,
    *,
    estimators: Mapping[str, Estimator],
) -> asyncio.Task[None]:
    """Write a step with `write_update` in the background; awaiting raises `RunFailed` if the disk is full."""
    path, titles = update_path(directory, step), {name: estimator.title for name, estimator in estimators.items()}

    async def write() -> None:
        with files.report_write_errors(directory):
            await in_thread(lambda: write_update(path, step, groups, result, estimators=titles))

    return start_task(write())


def write_update(
    path: Path,
    step: int,
    groups: Sequence[PreparedGroup],
    result: UpdateResult | None,
    *,
    estimators: Mapping[str, str],
) -> None:
    """Write a step atomically.

    Args:
        result: result of the training; None if nothing was trained.
        estimators: title of the estimator of each environment.
    """
    # Groups as they were trained, because estimators of whole steps change their advantages, and the places of their
    # sequences.
    trained: dict[int, tuple[PreparedGroup, range]] = {}
    count = 0
    for group in result.groups if result is not None else ():
        trained[group.group.draw] = group, range(count, count + len(group.data))
        count += len(group.data)
    rows = [trained.get(group.group.draw, (group, range(0))) for group in groups]
    columns: dict[str, Any] = {
        "step": pa.array([step] * len(rows), pa.int32()),
        "draw": pa.array([group.group.draw for group, _ in rows], pa.int64()),
        "env": pa.array([group.group.env for group, _ in rows]),
        "task": pa.array([group.group.task for group, _ in rows]),
        "estimator": pa.array([estimators.get(group.group.env) for group, _ in rows], pa.string()),
        "baseline": pa.array([_find_baseline(group) for group, _ in rows], pa.float64()),
        "sequences": make_lists(_encode_sequences(rows, result), [len(places) for _, places in rows]),
    }
    buffer = io.BytesIO()
    pq.write_table(
        pa.table(columns),
        buffer,
        compression="zstd",
        use_dictionary=False,
        write_statistics=["step", "draw"],  # pyright: ignore[reportArgumentType]  accepts column names, too
        column_encoding=dict.fromkeys(_NUMBERS, "BYTE_STREAM_SPLIT"),
        write_batch_size=2**16,  # values; the default of 1,024 makes a hundred calls for a column of tokens
        write_page_checksum=True,
        store_schema=False,  # it repeats the types of the columns
    )
    files.write_bytes(path, buffer.getvalue())


def read_update(path: Path) -> dict[int, RecordedUpdate]:
    """Return the groups in a file by draw; none if it does not exist; raise `UsageError` if it is damaged."""
    if not path.exists():
        return {}
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False)
        table = file.read(use_threads=False)
        rows = cast("list[dict[str, Any]]", table.drop_columns("sequences").to_pylist())
        lists = table.column("sequences").combine_chunks()
        sequences = _decode_sequences(lists.flatten())
        return {
            row["draw"]: RecordedUpdate(
                row["draw"], row["env"], row["estimator"] or "", row["baseline"], sequences[start:end]
            )
            for row, (start, end) in zip(rows, pairwise(row_ends(lists)), strict=True)
        }
    except (OSError, AttributeError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def place_numbers(
    sequences: Sequence[RecordedSequence], turns: Sequence[Mapping[str, Any]]
) -> dict[int, tuple[int, NDArray[np.float64]]]:
    """Return, for each turn of an episode that was trained, the position of its sequence and its tokens' numbers.

    Args:
        turns: the episode's turns, as rows of a table of episodes.

    Returns:
        By index of the turn: the sequence's position, and [2, C] advantages and log-probabilities of its completion,
        NaN for a token that was not trained.

    Raises:
        ValueError: a turn continues itself, or a later turn.
    """
    trained = dict[int, tuple[int, NDArray[np.float64]]]()
    for sequence in sequences:
        path = _list_path(turns, sequence.turn)
        rows = [np.append(np.zeros(len(turns[index]["prompt"])), turns[index]["logprobs"]) for index in path]
        # position t of the targets is token t + 1
        sampler_logprobs = np.concatenate(rows, dtype=np.float32)[1 : len(sequence.mask) + 1]
        targets = np.full((2, len(sequence.mask)), np.nan)
        targets[:, sequence.mask] = sequence.advantages, sequence.find_logprobs(sampler_logprobs[sequence.mask])
        start = -1
        for index in path:
            start += len(turns[index]["prompt"])
            numbers = np.full((2, len(turns[index]["completion"])), np.nan)
            part = targets[:, start : start + numbers.shape[1]]  # may be cut
            numbers[:, : part.shape[1]] = part
            if np.isfinite(part[0]).any():  # a turn before a fork is trained in one sequence only
                trained[index] = sequence.position, numbers
            start += numbers.shape[1]
    return trained


def _list_path(turns: Sequence[Mapping[str, Any]], last: int) -> list[int]:
    """Return the turns from the first of a segment to `last`."""
    path = [last]
    while (parent := turns[path[-1]]["parent"]) is not None:
        if parent not in range(path[-1]):
            raise ValueError(f"turn {path[-1]} continues turn {parent}")
        path.append(parent)
    return path[::-1]


def _encode_sequences(rows: Sequence[tuple[PreparedGroup, range]], result: UpdateResult | None) -> pa.StructArray:
    positions = [position for _, places in rows for position in places]
    data = [datum for group, places in rows if places for datum in group.data]
    paths = [path for group, places in rows if places for path in group.paths]
    logprobs = [] if result is None else [result.logprobs[position] for position in positions]
    masks = [datum.mask for datum in data]
    counts = [int(np.count_nonzero(mask)) for mask in masks]
    mask = np.concatenate([np.empty(0, np.bool_), *masks])

    def join(rows: Sequence[Floats]) -> Floats:
        return np.concatenate([np.empty(0, np.float32), *rows], dtype=np.float32)[mask]

    bits = join(logprobs).view(np.int32) ^ join([datum.logprobs for datum in data]).view(np.int32)
    return pa.StructArray.from_arrays(
        [
            pa.array(positions, pa.int32()),
            pa.array([member for member, _ in paths], pa.int32()),
            pa.array([turn for _, turn in paths], pa.int32()),
            make_lists(pa.array(mask), [len(mask) for mask in masks]),
            make_lists(pa.array(join([datum.advantages for datum in data])), counts),
            make_lists(pa.array(bits), counts),
        ],
        names=["position", "member", "turn", "mask", "advantages", "logprob_bits"],
    )


def _find_baseline(group: PreparedGroup) -> float | None:
    """Return the reward whose advantage is 0, if the advantages are a straight line over the rewards; None if not."""
    # Plain numbers: for a group of eight, arrays take six times as long.
    pairs = list[tuple[float, float]]()
    for episode, row in zip(group.group.episodes, group.advantages, strict=True):
        values = row.tolist()
        if episode.reward is not None and not episode.masked and values:
            if min(values) != max(values):
                return None
            pairs.append((episode.reward, values[0]))
    if not pairs:
        return None
    (low, at_low), (high, at_high) = min(pairs), max(pairs)
    if low == high:
        return None if any(advantage for _, advantage in pairs) else low
    slope = (at_high - at_low) / (high - low)
    error = 1e-6 * max(abs(at_low), abs(at_high))
    if not slope or any(abs(at_low + slope * (reward - low) - advantage) > error for reward, advantage in pairs):
        return None
    return low - at_low / slope


def _decode_sequences(sequences: pa.StructArray) -> list[RecordedSequence]:
    fields = dict(zip((field.name for field in sequences.type), sequences.flatten(), strict=True))
    numbers = [fields[name].to_pylist() for name in ("position", "member", "turn")]
    logprobs = "logprobs" if "logprobs" in fields else "logprob_bits"
    arrays = [split_lists(fields[name]) for name in ("mask", "advantages", logprobs)]
    return [RecordedSequence(*values) for values in zip(*numbers, *arrays, strict=True)]
