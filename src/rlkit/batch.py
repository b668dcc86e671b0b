"""Groups and advantages become training sequences.

Invariants: a datum's tokens are the exact tokens of one conversation; a token that the model did not sample has
advantage 0; a sampled token is trained in exactly one datum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlkit.advantages import AdvantageEstimator, by_turn
from rlkit.errors import EnvironmentFault, RunFailed
from rlkit.kl import Drift, KLPenalty
from rlkit.shaping import LengthPenalty, Normalization, clipped
from rlkit.types import Datum, Episode, Group, Prompt, join

type Excess = Literal["truncate", "drop", "error"]


@dataclass(frozen=True, slots=True)
class Preparation:
    """How groups become training sequences.

    A length penalty changes the rewards that the estimator sees; its advantages are clipped, the KL penalty is added to
    them, and what comes out is normalised.

    Args:
        estimators: by name of the environment.
        every_sequence: keep those whose advantages are all 0. Under the service's own losses their gradient is 0, so
            they are left out and cost nothing.
        max_tokens: longest sequence that is trained on; None for any.
        excess: what becomes of a longer one: its beginning is kept, it is left out, or the run ends.
        length_penalty: by name of the environment; of one that is not named, nothing is subtracted.
        clip: largest absolute advantage of an episode; None for any.
        kl_penalty: added to the advantages of single tokens; with one, every sequence has something to teach.
        normalization: None leaves the advantages as they are.
    """

    estimators: Mapping[str, AdvantageEstimator]
    every_sequence: bool = False
    max_tokens: int | None = None
    excess: Excess = "truncate"
    length_penalty: Mapping[str, LengthPenalty] = field(default_factory=dict[str, LengthPenalty])
    clip: float | None = None
    kl_penalty: KLPenalty | None = None
    normalization: Normalization | None = None

    async def prepare(self, group: Group) -> Prepared:
        """Estimate a group's advantages and assemble its sequences.

        Raises:
            EnvironmentFault: the estimator raised, or gave advantages of the wrong number or value.
            RunFailed: a sequence is too long, and that was to be an error.
            ServiceError: the reference of the KL penalty cannot be asked.
        """
        penalty, share, drift = None, None, None
        seen = group
        if group.env in self.length_penalty:
            seen, penalty = self.length_penalty[group.env].applied(group)
        advantages = _estimate(self.estimators[group.env], seen)
        if self.clip is not None:
            advantages, share = clipped(advantages, self.clip)
        data, owners, excess = list[Datum](), list[int](), 0
        for member, (episode, row) in enumerate(zip(group.episodes, advantages, strict=True)):
            for datum in episode_data(episode, row) if episode.reward is not None else ():
                trained = self._every or bool(datum.advantages.any())
                fitting = self._fitted(datum, group, trained=trained)
                excess += trained and fitting is not datum
                if fitting is not None:
                    data.append(fitting)
                    owners.append(member)
        if self.kl_penalty is not None:
            data, drift = await self.kl_penalty.applied(data)
        if self.normalization is not None:
            data = _normalized(data, owners, self.normalization, np.flatnonzero(group.valid))
        kept = tuple(datum for datum in data if self._every or datum.advantages.any())
        return Prepared(group, advantages, kept, excess, penalty, share, drift)

    @property
    def _every(self) -> bool:
        return self.every_sequence or self.kl_penalty is not None

    def _fitted(self, datum: Datum, group: Group, *, trained: bool) -> Datum | None:
        if self.max_tokens is None or len(datum.targets) < self.max_tokens:
            return datum
        if self.excess == "error" and trained:
            raise RunFailed(
                f"a sequence of {len(datum.targets) + 1} tokens of {group.env}, task {group.task}, is longer than "
                f"batch.max_tokens = {self.max_tokens}"
            )
        cut = _cut(datum, self.max_tokens - 1)
        return None if self.excess == "drop" or not cut.mask.any() else cut


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A group, ready to be trained on.

    Args:
        group: as it was played.
        advantages: for each episode, [turns] float64.
        data: the sequences that have something to teach.
        excess: how many sequences were too long.
        length_penalty: what was subtracted from the reward of a valid episode, in the mean; None without a penalty.
        clipped: share of the advantages that were clipped; None without a limit.
        drift: from the reference of the KL penalty; None without one.
    """

    group: Group
    advantages: list[NDArray[np.float64]]
    data: tuple[Datum, ...]
    excess: int = 0
    length_penalty: float | None = None
    clipped: float | None = None
    drift: Drift | None = None

    @property
    def teaches(self) -> bool:
        """Whether its episodes have advantages; a penalty or a loss of one's own may train on others too."""
        return bool(self.data) and any(row.any() for row in self.advantages)


def _estimate(estimator: AdvantageEstimator, group: Group) -> list[NDArray[np.float64]]:
    try:
        return by_turn(estimator(group), group)
    except EnvironmentFault:
        raise
    except Exception as error:  # the user's own code
        told = f"{type(error).__name__}: {error}"
        raise EnvironmentFault(f"the advantage estimator failed on a group of {group.env}: {told}") from error


def _normalized(
    data: Sequence[Datum], owners: Sequence[int], normalization: Normalization, members: NDArray[np.int64]
) -> list[Datum]:
    """The sequences of the group's valid `members` with their advantages divided; `owners` has a member for each."""
    tokens = dict.fromkeys(members.tolist(), 0)
    for datum, owner in zip(data, owners, strict=True):
        tokens[owner] += int(np.count_nonzero(datum.mask))
    weights = dict(zip(tokens, normalization.weights(np.array([*tokens.values()], np.int64)), strict=True))
    return [
        replace(datum, advantages=datum.advantages * np.float32(weights[owner]))
        for datum, owner in zip(data, owners, strict=True)
    ]


def _cut(datum: Datum, count: int) -> Datum:
    """The first `count` positions, or fewer: an image is not cut in two."""
    for image in datum.prompt.images:
        if image.start < count < image.start + image.length:
            count = image.start
    images = tuple(image for image in datum.prompt.images if image.start < count)
    return Datum(
        prompt=Prompt(datum.prompt.tokens[:count], images),
        targets=datum.targets[:count],
        logprobs=datum.logprobs[:count],
        advantages=datum.advantages[:count],
        mask=datum.mask[:count],
    )


def episode_data(episode: Episode, advantages: NDArray[np.float64]) -> Iterator[Datum]:
    """One datum for each path from a segment's first turn to a last one.

    Args:
        episode: its turns, each naming the turn that it extends.
        advantages: [turns] float64.
    """
    turns = episode.turns
    parents = {turn.parent for turn in turns}
    trained = set[int]()
    for last in range(len(turns)):
        if last in parents:
            continue
        path = _path(episode, last)
        yield _datum(episode, path, advantages, fresh=[index not in trained for index in path])
        trained.update(path)


def _path(episode: Episode, last: int) -> list[int]:
    path, index = list[int](), last
    while True:
        path.append(index)
        parent = episode.turns[index].parent
        if parent is None:
            return path[::-1]
        index = parent


def _datum(episode: Episode, path: list[int], advantages: NDArray[np.float64], *, fresh: list[bool]) -> Datum:
    pieces = list[Prompt]()
    logprobs, weights, masks = list[NDArray[np.float32]](), list[NDArray[np.float32]](), list[NDArray[np.bool_]]()
    for index, new in zip(path, fresh, strict=True):
        turn = episode.turns[index]
        given = len(turn.prompt)
        pieces += [turn.prompt, Prompt(turn.completion)]
        mask = turn.sampled & new
        logprobs += [np.zeros(given, np.float32), np.where(mask, turn.logprobs, np.float32(0))]
        weights += [np.zeros(given, np.float32), np.where(mask, np.float32(advantages[index]), np.float32(0))]
        masks += [np.zeros(given, np.bool_), mask]
    prompt = join(pieces)
    images = tuple(image for image in prompt.images if image.start < len(prompt) - 1)
    return Datum(
        prompt=Prompt(prompt.tokens[:-1], images),
        targets=np.maximum(prompt.tokens[1:], 0),  # an image position predicts nothing, but must hold a token
        logprobs=np.concatenate(logprobs)[1:],
        advantages=np.concatenate(weights)[1:],
        mask=np.concatenate(masks)[1:],
    )
