"""Batching of the first turns of a group into one request.

Invariant: a completion depends on its own seed only, whether its request went out alone or with others: sample i of a
request with seed s is drawn as sample 0 of a request with seed s + i. The embedded engine promises this; other services
may draw other tokens from the same distribution.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rlkit._util.stopwatch import Stopwatch, current_stopwatches, use_stopwatches
from rlkit.errors import ServiceError
from rlkit.policy import Sampler
from rlkit.types import Completion, Prompt, Sampling

type _Key = tuple[int, bytes, tuple[object, ...], Sampling]


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A rollout's request for one completion."""

    seed: int
    completion: asyncio.Future[Completion]
    stopwatches: frozenset[Stopwatch]


class RequestBatcher:
    """Joins requests of the same instant for the same prompt, settings and weights into one.

    They are answered together, when the longest completion is done. For rollouts of one turn that costs nothing, since
    their group waits for the longest anyway; a conversation would wait at its first turn.
    """

    def __init__(self) -> None:
        self._pending = dict[_Key, list[_Request]]()
        self._tasks = set[asyncio.Task[None]]()

    def wrap(self, sampler: Sampler) -> Sampler:
        """Return a sampler of the same weights whose requests are batched."""
        return _BatchedSampler(sampler, self)

    async def sample(self, sampler: Sampler, prompt: Prompt, sampling: Sampling, seed: int) -> Completion:
        """Draw a completion, in one request with others."""
        key = (sampler.version, prompt.tokens.tobytes(), prompt.images, sampling)
        request = _Request(seed, asyncio.get_running_loop().create_future(), current_stopwatches())
        if key in self._pending:
            self._pending[key].append(request)
        else:
            self._pending[key] = [request]
            task = asyncio.create_task(self._send(key, sampler, prompt, sampling))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await request.completion

    def close(self) -> None:
        """Cancel the requests that are still open."""
        for task in self._tasks:
            task.cancel()

    async def _send(self, key: _Key, sampler: Sampler, prompt: Prompt, sampling: Sampling) -> None:
        await asyncio.sleep(0)  # the group's other rollouts, started in the same instant, get here now
        requests = [request for request in self._pending.pop(key) if not request.completion.done()]
        await asyncio.gather(*(_answer(batch, sampler, prompt, sampling) for batch in _split_by_seed(requests)))


@dataclass(frozen=True, slots=True, eq=False)
class _BatchedSampler(Sampler):
    """The sampler that a rollout gets for its first turn."""

    sampler: Sampler
    batcher: RequestBatcher

    @property
    def version(self) -> int:
        return self.sampler.version

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        if num_samples != 1:
            return await self.sampler.sample(prompt, sampling, seed=seed, num_samples=num_samples)
        return [await self.batcher.sample(self.sampler, prompt, sampling, seed)]


def _split_by_seed(requests: Sequence[_Request]) -> list[list[_Request]]:
    """Split requests into batches whose seeds count up by one."""
    ordered = enumerate(sorted(requests, key=lambda request: request.seed))
    return [[request for _, request in batch] for _, batch in groupby(ordered, lambda pair: pair[1].seed - pair[0])]


async def _answer(batch: Sequence[_Request], sampler: Sampler, prompt: Prompt, sampling: Sampling) -> None:
    try:
        with use_stopwatches(stopwatch for request in batch for stopwatch in request.stopwatches):
            completions = await sampler.sample(prompt, sampling, seed=batch[0].seed, num_samples=len(batch))
            if len(completions) != len(batch):
                raise ServiceError(f"sampling: requested {len(batch)} samples, got {len(completions)}")
    except Exception as error:  # whatever it is, each of the rollouts gets it
        for request in batch:
            if not request.completion.done():
                request.completion.set_exception(error)
        return
    for request, completion in zip(batch, completions, strict=True):
        if not request.completion.done():
            request.completion.set_result(completion)
