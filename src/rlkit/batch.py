"""Groups and advantages become training sequences.

Invariants: a datum's tokens are the exact tokens of one conversation; a token that the model did not sample has
advantage 0; a sampled token is trained in exactly one datum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlkit.advantages import BatchEstimator, Estimator, by_turn
from rlkit.errors import EnvironmentFault, RunFailed
from rlkit.types import Datum, Episode, Group, Prompt, join

type Excess = Literal["truncate", "drop", "error"]


@dataclass(frozen=True, slots=True)
class Preparation:
    """How groups become training sequences.

    Args:
        estimators: by name of the environment.
        every_sequence: keep those whose advantages are all 0. Under the service's own losses their gradient is 0, so
            they are left out and cost nothing.
        max_tokens: longest sequence that is trained on; None for any.
        excess: what becomes of a longer one: its beginning is kept, it is left out, or the run ends.
    """

    estimators: Mapping[str, Estimator]
    every_sequence: bool = False
    max_tokens: int | None = None
    excess: Excess = "truncate"

    def prepare(self, group: Group) -> Prepared:
        """Estimate a group's advantages and assemble its sequences; a `BatchEstimator` sees it as the whole step.

        Raises:
            EnvironmentFault: the estimator raised, or gave advantages of the wrong number or value.
            RunFailed: a sequence is too long, and that was to be an error.
        """
        return self._assembled(group, _estimate(self.estimators[group.env], [group])[0])

    @property
    def whole_steps(self) -> bool:
        """Whether the advantages of a group may depend on the others of its step."""
        return any(isinstance(one, BatchEstimator) for one in self.estimators.values())

    def together(self, prepared: Sequence[Prepared]) -> list[Prepared]:
        """The groups of a step, those of each `BatchEstimator` estimated together.

        Raises:
            EnvironmentFault: as `prepare` says.
            RunFailed: likewise.
        """
        made = list(prepared)
        for name, estimator in self.estimators.items():
            places = [place for place, one in enumerate(prepared) if one.group.env == name]
            if places and isinstance(estimator, BatchEstimator):
                groups = [prepared[place].group for place in places]
                for place, advantages in zip(places, _estimate(estimator, groups), strict=True):
                    made[place] = self._assembled(prepared[place].group, advantages)
        return made

    def _assembled(self, group: Group, advantages: list[NDArray[np.float64]]) -> Prepared:
        data, excess = list[Datum](), 0
        for episode, row in zip(group.episodes, advantages, strict=True):
            for datum in episode_data(episode, row):
                if not (self.every_sequence and episode.reward is not None) and not datum.advantages.any():
                    continue
                fitting = self._fitted(datum, group)
                excess += fitting is not datum
                if fitting is not None:
                    data.append(fitting)
        return Prepared(group, advantages, tuple(data), excess)

    def _fitted(self, datum: Datum, group: Group) -> Datum | None:
        if self.max_tokens is None or len(datum.targets) < self.max_tokens:
            return datum
        if self.excess == "error":
            raise RunFailed(
                f"a sequence of {len(datum.targets) + 1} tokens of {group.env}, task {group.task}, is longer than "
                f"batch.max_tokens = {self.max_tokens}"
            )
        cut = _cut(datum, self.max_tokens - 1)
        return None if self.excess == "drop" or not cut.advantages.any() else cut


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A group, ready to be trained on.

    Args:
        group: as it was played.
        advantages: for each episode, [turns] float64.
        data: the sequences that have something to teach.
        excess: how many sequences were too long.
    """

    group: Group
    advantages: list[NDArray[np.float64]]
    data: tuple[Datum, ...]
    excess: int = 0


def _estimate(estimator: Estimator, groups: Sequence[Group]) -> list[list[NDArray[np.float64]]]:
    """The advantages of each group, checked; only a `BatchEstimator` sees more than one."""
    env = groups[0].env
    try:
        if isinstance(estimator, BatchEstimator):
            found = estimator(groups)
            if len(found) != len(groups):
                raise EnvironmentFault(
                    f"the estimator gave advantages for {len(found)} of {len(groups)} groups of {env}"
                )
        else:
            found = [estimator(group) for group in groups]
        return [by_turn(advantages, group) for advantages, group in zip(found, groups, strict=True)]
    except EnvironmentFault:
        raise
    except Exception as error:  # the user's own code
        told = f"{type(error).__name__}: {error}"
        raise EnvironmentFault(f"the advantage estimator failed on a group of {env}: {told}") from error


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
