"""Audit of a run on its own record: it trains on what was sampled, once, and on nothing else.

Invariant: what is checked and what checks it share no code. The sequences are made anew from the recorded episodes by
`rlkit.algorithms.datums`, as the run made them, with a number for each turn in the place of its advantage; each of
their tokens is then looked for in the record by comparing whole prefixes, token for token.

What a service was sent is not recorded. It is made from the same episodes by the same code, which scales advantages by
estimators and penalties, but for none of them changes a token, a log-probability or a mask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlkit.algorithms.datums import Excess, Preparation
from rlkit.config import load_config
from rlkit.store.history import load_history
from rlkit.store.metadata import find_run, find_run_config
from rlkit.types import Datum, Episode, Group, Prompt, Turn, join


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts of the groups of one environment that steps were made of.

    Args:
        episodes: episodes that neither failed nor are masked, with their `turns` and `sequences`.
        tokens: tokens that are trained on, each of which was sampled where it stands.
        cut: tokens that were sampled, and are not trained on for the length of their sequence.
        mismatch: the first token that is not as it was sampled, after which nothing is counted; or the draws of which
            several steps are made.
    """

    groups: int = 0
    episodes: int = 0
    turns: int = 0
    sequences: int = 0
    tokens: int = 0
    cut: int = 0
    mismatch: str | None = None

    def __add__(self, other: Audit) -> Audit:
        return Audit(
            self.groups + other.groups,
            self.episodes + other.episodes,
            self.turns + other.turns,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.cut + other.cut,
            self.mismatch or other.mismatch,
        )

    def __str__(self) -> str:
        cut = f"; {self.cut:,} more are left out, as batch.max_tokens says" if self.cut else ""
        return (
            f"{self.tokens:,} tokens in {self.turns:,} turns of {self.episodes:,} episodes are trained on, each "
            f"where it was sampled{cut}"
        )


async def audit_run(run: str | Path) -> tuple[Path, dict[str, Audit]]:
    """Audit a run, named or by its folder, with the settings that it has recorded: its folder, and as `audit` returns.

    Raises:
        UsageError: there is no such run, or its record is damaged.
    """
    directory = find_run(run)
    batch = load_config([find_run_config(directory)]).config.batch
    return directory, await audit(directory, max_tokens=batch.max_tokens, excess=batch.too_long)


async def audit(directory: Path, *, max_tokens: int | None = None, excess: Excess = "truncate") -> dict[str, Audit]:
    """Check all steps of a run up to the first mismatch, and that no draw is in two of them.

    Args:
        directory: the run's folder.
        max_tokens: the run's `batch.max_tokens`.
        excess: the run's `batch.too_long`.

    Returns:
        The counts by name of the environment.

    Raises:
        UsageError: the record is damaged, or a part of it is gone.
    """
    history, audits = load_history(directory), dict[str, Audit]()
    taken = defaultdict[str, dict[int, list[int]]](lambda: defaultdict(list))  # by environment and draw: its steps
    for step in range(1, history.step + 1):
        for member in history.groups(step):
            name, group = member.group.env, member.group
            taken[name][group.draw].append(step)
            if not member.is_trained:
                continue
            checked = await audit_group(group, max_tokens=max_tokens, excess=excess)
            if checked.mismatch is not None:
                checked = Audit(mismatch=f"step {step}, {name}, task {group.task}: {checked.mismatch}")
            audits[name] = audits.get(name, Audit()) + checked
            if checked.mismatch is not None:
                return audits
    for env, steps in taken.items():
        if (repeated := _repeated(steps)) is not None:
            audits[env] = audits.get(env, Audit()) + Audit(mismatch=f"{env}: {repeated}")
    return audits


def _repeated(steps: Mapping[int, Sequence[int]]) -> str | None:
    """Name the draws that are in several steps, given the steps of each draw; None if there are none."""
    again = {draw: steps[draw] for draw in sorted(steps) if len(steps[draw]) > 1}
    if not again:
        return None
    first, later = ({own[place] for own in again.values()} for place in (0, -1))
    return (
        f"draws {_ranges(again)} were taken in steps {_ranges(first)} and again in steps {_ranges(later)}: the run was "
        "resumed without the state of its task sources, and these tasks count twice"
    )


def _ranges(numbers: Iterable[int]) -> str:
    """`0–5, 8` for the numbers 0 to 5 and 8."""
    runs = list[list[int]]()
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


async def audit_group(group: Group, *, max_tokens: int | None = None, excess: Excess = "truncate") -> Audit:
    """Make a group's sequences and check them."""
    numbered = Preparation({group.env: _numbers}, every_sequence=True, max_tokens=max_tokens, excess=excess)
    return check(group, (await numbered.prepare(group)).data, whole=max_tokens is None)


def check(group: Group, data: Sequence[Datum], *, whole: bool = True) -> Audit:
    """Look for each token that is trained on in the record.

    Args:
        group: as it was recorded.
        data: made of it, with its turns numbered from 1 in the place of their advantages.
        whole: each sampled token must be trained on.
    """
    samples, tokens = list(_samples(group)), 0
    for number, datum in enumerate(data):
        if (wrong := _misfit(datum, samples)) is not None:
            return Audit(mismatch=f"sequence {number}: {wrong}")
        tokens += int(np.count_nonzero(datum.mask))
    missing = [(sample, np.flatnonzero(sample.turn.sampled & ~sample.trained)) for sample in samples]
    cut = sum(len(places) for _, places in missing)
    if whole and cut:
        sample, places = next(each for each in missing if len(each[1]))
        return Audit(mismatch=f"{sample.place}: the token {int(places[0])} that it sampled is in no sequence")
    valid = sum(episode.reward is not None and not episode.masked for episode in group.episodes)
    return Audit(1, valid, len(samples), len(data), tokens, cut)


@dataclass(slots=True, eq=False)
class _Sample:
    """A turn of an episode that is to be trained on.

    Args:
        number: number in the place of its advantage.
        place: place for messages.
        turn: the recorded turn.
        sequence: its whole prompt and completion.
        trained: [C] bool, the tokens that were met in a sequence so far.
    """

    number: float
    place: str
    turn: Turn
    sequence: Prompt
    trained: NDArray[np.bool_]


def _numbers(group: Group) -> list[NDArray[np.float64]]:
    ends = np.cumsum([len(episode.turns) for episode in group.episodes])
    return [
        np.arange(end - len(episode.turns) + 1, end + 1, dtype=np.float64)
        for end, episode in zip(ends, group.episodes, strict=True)
    ]


def _samples(group: Group) -> Iterator[_Sample]:
    for episode, numbers in zip(group.episodes, _numbers(group), strict=True):
        if episode.reward is None or episode.masked:
            continue
        for index, (turn, sequence) in enumerate(zip(episode.turns, _sequences(episode), strict=True)):
            place = f"member {episode.member}, turn {index}"
            yield _Sample(float(numbers[index]), place, turn, sequence, np.zeros(len(turn.completion), np.bool_))


def _sequences(episode: Episode) -> list[Prompt]:
    """Return all tokens of each turn, its parents' first."""
    sequences = list[Prompt]()
    for turn in episode.turns:
        before = [] if turn.parent is None else [sequences[turn.parent]]
        sequences.append(join([*before, turn.prompt, Prompt(turn.completion)]))
    return sequences


def _misfit(datum: Datum, samples: Sequence[_Sample]) -> str | None:
    """Return what is wrong with a sequence, or None; mark the sampled tokens that it trains on."""
    tokens = np.concatenate([datum.prompt.tokens, datum.targets[-1:]])
    if not np.array_equal(datum.targets, np.maximum(tokens[1:], 0)):
        at = int(np.flatnonzero(datum.targets != np.maximum(tokens[1:], 0))[0])
        return f"the token to be predicted at position {at} is not the one that follows there"
    stray = ~datum.mask & (datum.advantages != 0)
    if stray.any():
        at = int(np.flatnonzero(stray)[0])
        return f"token {datum.targets[at]} at position {at + 1} has an advantage and was not sampled"
    left = datum.mask.copy()
    for one in samples:
        begin = len(one.sequence) - len(one.turn.completion)
        end = min(len(one.sequence), len(tokens))
        if begin >= end or not _begins_alike(datum.prompt, tokens, one.sequence, end):
            continue
        count = end - begin
        # position t predicts token t + 1
        here = slice(begin - 1, end - 1)
        fits = left[here] & one.turn.sampled[:count] & ~one.trained[:count]
        fits &= datum.advantages[here] == np.float32(one.number)
        fits &= datum.logprobs[here] == one.turn.logprobs[:count]
        left[here] &= ~fits
        one.trained[:count] |= fits
    if not left.any():
        return None
    at = int(np.flatnonzero(left)[0])
    return f"token {datum.targets[at]} at position {at + 1} is trained on, and was not sampled there"


def _begins_alike(prompt: Prompt, tokens: NDArray[np.int32], sequence: Prompt, count: int) -> bool:
    if not np.array_equal(tokens[:count], sequence.tokens[:count]):
        return False
    seen = [image for image in sequence.images if image.start < count]
    return list(prompt.images[: len(seen)]) == seen
