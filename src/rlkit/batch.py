"""Groups and advantages become training sequences.

Invariants: a datum's tokens are the exact tokens of one conversation; a token that the model did not sample has
advantage 0; a sampled token is trained in exactly one datum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlkit.advantages import AdvantageEstimator, by_turn
from rlkit.errors import EnvironmentFault
from rlkit.types import Datum, Episode, Group, Prompt, join


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one optimiser step is computed from.

    Args:
        groups: all that were played, ordered by draw.
        advantages: for each group, for each episode, [turns] float64.
        data: the sequences that have something to teach.
    """

    groups: tuple[Group, ...]
    advantages: tuple[list[NDArray[np.float64]], ...]
    data: tuple[Datum, ...]


def make_batch(
    groups: Sequence[Group], estimators: Mapping[str, AdvantageEstimator], *, every_sequence: bool = False
) -> Batch:
    """Estimate advantages, each group with its environment's estimator, and assemble the sequences.

    Args:
        groups: of one step.
        estimators: by name of the environment.
        every_sequence: keep those whose advantages are all 0. Under the service's own losses their gradient is 0, so
            they are left out and cost nothing.

    Raises:
        EnvironmentFault: an estimator raised, or gave advantages of the wrong number or value.
    """
    advantages = tuple(_estimate(estimators[group.env], group) for group in groups)
    data = [
        datum
        for group, rows in zip(groups, advantages, strict=True)
        for episode, row in zip(group.episodes, rows, strict=True)
        for datum in episode_data(episode, row)
        if every_sequence or datum.advantages.any()
    ]
    return Batch(tuple(groups), advantages, tuple(data))


def _estimate(estimator: AdvantageEstimator, group: Group) -> list[NDArray[np.float64]]:
    try:
        return by_turn(estimator(group), group)
    except EnvironmentFault:
        raise
    except Exception as error:  # the user's own code
        told = f"{type(error).__name__}: {error}"
        raise EnvironmentFault(f"the advantage estimator failed on a group of {group.env}: {told}") from error


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
