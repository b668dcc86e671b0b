"""Audit of a run: check that it trained on each sampled token once, and on no other token.

Invariant: the check shares no code with the construction of training data. `rlkit.algorithms.datums` rebuilds the
sequences from the recorded episodes, with turn numbers in place of advantages. The audit then searches for each token
in the recorded turns, by comparing prefixes.

Tokens sent to the service are not recorded, but the same code builds them from the same episodes. Estimators and
penalties change only advantages, not tokens, log-probabilities or masks. The recorded advantages and log-probabilities
of the trainer must belong to exactly these tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlkit.algorithms.advantages import as_estimator
from rlkit.algorithms.datums import OverlongAction, Preparation, PreparedGroup
from rlkit.config.loading.load import load_config
from rlkit.config.loading.run_config import find_run, find_run_config
from rlkit.store.history import load_history
from rlkit.token_records.updates import RecordedUpdate, read_update, update_path
from rlkit.types import Datum, Group, Prompt, Turn, join


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts for one environment, over the groups that were trained on."""

    groups: int = 0
    episodes: int = 0  # episodes that did not fail and are not masked
    turns: int = 0
    sequences: int = 0
    tokens: int = 0  # trained tokens that match a sampled token at the same position
    cut_tokens: int = 0  # sampled tokens that were not trained on, because their sequence exceeds `batch.max_tokens`
    # First difference from the record, or the draws that occur in several steps. Counting stops at a mismatch.
    mismatch: str | None = None

    def __add__(self, other: Audit) -> Audit:
        counts = zip(astuple(self)[:-1], astuple(other)[:-1], strict=True)
        return Audit(*map(sum, counts), mismatch=self.mismatch or other.mismatch)

    def __str__(self) -> str:
        cut = f"; {self.cut_tokens:,} more are left out because of batch.max_tokens" if self.cut_tokens else ""
        return (
            f"{self.tokens:,} tokens in {self.turns:,} turns of {self.episodes:,} episodes are trained on, each "
            f"where it was sampled{cut}"
        )


async def audit_run(run: str | Path) -> tuple[Path, dict[str, Audit]]:
    """Audit a run, by name or folder, with its recorded settings; return its folder and the result of `audit`.

    Raises:
        UsageError: the run does not exist, or its record is damaged.
    """
    directory = find_run(run)
    batch = load_config([find_run_config(directory)]).config.batch
    return directory, await audit(directory, max_tokens=batch.max_tokens, overlong=batch.overlong)


async def audit(
    directory: Path, *, max_tokens: int | None = None, overlong: OverlongAction = "truncate"
) -> dict[str, Audit]:
    """Check all steps of a run up to the first mismatch, and check that no draw occurs in two steps.

    Returns:
        Counts by name of the environment.

    Raises:
        UsageError: the record is damaged or incomplete.
    """
    history, audits = load_history(directory), dict[str, Audit]()
    steps_by_draw = defaultdict[str, dict[int, list[int]]](lambda: defaultdict(list))  # by environment
    for step in range(1, history.step + 1):
        updates = read_update(update_path(directory, step))
        for member in history.groups(step):
            name, group = member.group.env, member.group
            steps_by_draw[name][group.draw].append(step)
            if not member.is_trained:
                continue
            recorded = updates.get(group.draw)
            group_audit = await audit_group(group, max_tokens=max_tokens, overlong=overlong, recorded=recorded)
            if group_audit.mismatch is not None:
                mismatch = f"step {step}, {name}, task {group.task}: {group_audit.mismatch}"
                return audits | {name: audits.get(name, Audit()) + Audit(mismatch=mismatch)}
            audits[name] = audits.get(name, Audit()) + group_audit
        for draw, recorded in updates.items():
            if step not in steps_by_draw[recorded.env][draw]:
                mismatch = f"step {step}, {recorded.env}: draw {draw} of the recorded update is no group of the step"
                return audits | {recorded.env: audits.get(recorded.env, Audit()) + Audit(mismatch=mismatch)}
    for env, steps in steps_by_draw.items():
        if (repeated := _describe_repeated_draws(steps)) is not None:
            audits[env] = audits.get(env, Audit()) + Audit(mismatch=f"{env}: {repeated}")
    return audits


def _describe_repeated_draws(steps: Mapping[int, Sequence[int]]) -> str | None:
    """Return a message about the draws that occur in several steps, or None."""
    repeated = {draw: steps[draw] for draw in sorted(steps) if len(steps[draw]) > 1}
    if not repeated:
        return None
    first, later = ({draw_steps[index] for draw_steps in repeated.values()} for index in (0, -1))
    return (
        f"draws {_render_ranges(repeated)} were trained on in steps {_render_ranges(first)} and again in steps "
        f"{_render_ranges(later)}: the run was resumed without the state of its task sources, so these tasks count "
        "twice"
    )


def _render_ranges(numbers: Iterable[int]) -> str:
    """Render numbers as ranges, such as `0–5, 8`."""
    # Consecutive numbers are equally far above their places in the order.
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ranges = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ranges)


async def audit_group(
    group: Group,
    *,
    max_tokens: int | None = None,
    overlong: OverlongAction = "truncate",
    recorded: RecordedUpdate | None = None,
) -> Audit:
    """Rebuild a group's training sequences and check them, and the record of the update if there is one."""
    estimators = {group.env: as_estimator(_number_turns)}
    numbered = Preparation(estimators, every_sequence=True, max_tokens=max_tokens, overlong=overlong)
    # an estimator sees one role at a time, and numbers the turns of all
    turns = [tuple(replace(turn, role=None, frozen=False) for turn in episode.turns) for episode in group.episodes]
    episodes = [replace(episode, turns=own) for episode, own in zip(group.episodes, turns, strict=True)]
    prepared = await numbered.prepare(replace(group, episodes=tuple(episodes)))
    result = check(group, prepared.data, whole=max_tokens is None)
    if recorded is None or result.mismatch is not None:
        return result
    problem = _find_record_mismatch(prepared, recorded)
    return result if problem is None else Audit(mismatch=problem)


def _find_record_mismatch(prepared: PreparedGroup, recorded: RecordedUpdate) -> str | None:
    """Return the first difference of a recorded update from the rebuilt sequences, or None."""
    data = dict(zip(prepared.paths, prepared.data, strict=True))
    for sequence in recorded.sequences:
        place = f"the recorded sequence of member {sequence.member} up to turn {sequence.turn}"
        datum = data.pop((sequence.member, sequence.turn), None)
        if datum is None:
            return f"{place} is no training sequence"
        if not np.array_equal(datum.mask, sequence.mask):
            return f"{place} has other trained tokens than its episode"
        if not len(sequence.advantages) == len(sequence.logprob_bits) == np.count_nonzero(datum.mask):
            return f"{place} lacks advantages or log-probabilities of the trainer"
        if not np.isfinite(sequence.advantages).all():
            return f"{place} has an advantage that is not finite"
        if not np.isfinite(sequence.find_logprobs(datum.logprobs[datum.mask])).all():
            return f"{place} has a log-probability of the trainer that is not finite"
    return None


def check(group: Group, data: Sequence[Datum], *, whole: bool = True) -> Audit:
    """Check that each trained token of a group was sampled.

    Args:
        data: sequences of the group, with turn numbers (from 1) in place of advantages.
        whole: also require that each sampled token is trained on.
    """
    samples, tokens = list(_list_samples(group)), 0
    for number, datum in enumerate(data):
        if (problem := _find_mismatch(datum, samples)) is not None:
            return Audit(mismatch=f"sequence {number}: {problem}")
        tokens += int(np.count_nonzero(datum.mask))
    missing = [(sample, np.flatnonzero(sample.turn.sampled_mask & ~sample.trained)) for sample in samples]
    cut = sum(len(places) for _, places in missing)
    if whole and cut:
        sample, places = next((sample, places) for sample, places in missing if len(places))
        return Audit(mismatch=f"{sample.place}: sampled token {int(places[0])} is in no training sequence")
    valid = sum(episode.reward is not None and not episode.masked for episode in group.episodes)
    return Audit(1, valid, len(samples), len(data), tokens, cut)


@dataclass(slots=True, eq=False)
class _Sample:
    """Turn of an episode that is used for training."""

    number: float  # turn number, in place of the advantage
    place: str
    turn: Turn
    sequence: Prompt  # complete prompt and completion
    trained: NDArray[np.bool_]  # [C] bool, tokens of the completion found in a training sequence so far


def _number_turns(group: Group) -> list[NDArray[np.float64]]:
    lengths = [len(episode.turns) for episode in group.episodes]
    numbers = np.arange(1, sum(lengths) + 1, dtype=np.float64)
    return np.split(numbers, np.cumsum(lengths)[:-1]) if lengths else []


def _list_samples(group: Group) -> Iterator[_Sample]:
    for episode, numbers in zip(group.episodes, _number_turns(group), strict=True):
        if episode.reward is None or episode.masked:
            continue
        sequences = list[Prompt]()
        for number, turn in zip(numbers.tolist(), episode.turns, strict=True):
            place = f"member {episode.member}, turn {len(sequences)}"
            prefix = [] if turn.parent is None else [sequences[turn.parent]]
            sequences.append(join([*prefix, turn.prompt, Prompt(turn.completion)]))
            yield _Sample(number, place, turn, sequences[-1], np.zeros(len(turn.completion), np.bool_))


def _find_mismatch(datum: Datum, samples: Sequence[_Sample]) -> str | None:
    """Return the first mismatch of a sequence, or None; mark the sampled tokens that it trains on in `samples`."""
    tokens = np.concatenate([datum.prompt.tokens, datum.targets[-1:]])
    if (position := _find_first(datum.targets != np.maximum(tokens[1:], 0))) is not None:
        return f"the target at position {position} is not the next token of the sequence"
    if (position := _find_first(~datum.mask & (datum.advantages != 0))) is not None:
        return f"token {datum.targets[position]} at position {position + 1} has an advantage but was not sampled"
    unmatched = datum.mask.copy()
    for sample in samples:
        begin = len(sample.sequence) - len(sample.turn.completion)
        end = min(len(sample.sequence), len(tokens))
        if begin >= end or not _has_prefix(datum.prompt, tokens, sample.sequence, end):
            continue
        count = end - begin
        # position t predicts token t + 1
        span = slice(begin - 1, end - 1)
        matches = unmatched[span] & sample.turn.sampled_mask[:count] & ~sample.trained[:count]
        matches &= datum.advantages[span] == np.float32(sample.number)
        matches &= np.isclose(datum.logprobs[span], sample.turn.logprobs[:count], 0, 0, equal_nan=True)
        unmatched[span] &= ~matches
        sample.trained[:count] |= matches
    if (position := _find_first(unmatched)) is not None:
        return f"token {datum.targets[position]} at position {position + 1} is trained on but was not sampled there"
    return None


def _find_first(flags: NDArray[np.bool_]) -> int | None:
    """Return the index of the first True, or None."""
    return int(flags.argmax()) if flags.any() else None


def _has_prefix(prompt: Prompt, tokens: NDArray[np.int32], sequence: Prompt, count: int) -> bool:
    if not np.array_equal(tokens[:count], sequence.tokens[:count]):
        return False
    images = [image for image in sequence.images if image.start < count]
    return list(prompt.images[: len(images)]) == images
