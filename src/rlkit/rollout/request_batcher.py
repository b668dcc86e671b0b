"""Batching of the first turns of a group into one request.

Invariant: batching does not change a completion: sample i of a request with seed s equals sample 0 of a request with
seed s + i. The embedded engine guarantees this; other services may draw other tokens from the same distribution.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class RequestBatcher:
    """Merge simultaneous requests for the same prompt, settings and weights into one request.

    The service answers when the longest completion is finished. Single-turn rollouts lose nothing, because their group
    waits for the longest completion anyway; a conversation would wait at its first turn.
    """

    members: int = 1  # number of rollouts of the group
    wait_s: float = 0.0  # time to wait for the requests of all members; 0 for the current iteration of the event loop
    # Has a result once all members have sent their requests.
    _complete: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _pending: dict[_Key, list[_Request]] = field(default_factory=dict[_Key, "list[_Request]"])
    _tasks: list[asyncio.Task[None]] = field(default_factory=list["asyncio.Task[None]"])

    def wrap(self, sampler: Sampler) -> Sampler:
        """Return a sampler of the same weights whose requests are batched."""
        return _BatchedSampler(sampler, self, sampler.version)

    async def sample(self, sampler: Sampler, prompt: Prompt, sampling: Sampling, seed: int) -> Completion:
        """Draw a completion as part of a batched request."""
        key = (sampler.version, prompt.tokens.tobytes(), prompt.images, sampling)
        request = _Request(seed, asyncio.get_running_loop().create_future(), current_stopwatches())
        requests = self._pending.setdefault(key, [])
        requests.append(request)
        if len(requests) == 1:
            self._tasks.append(asyncio.create_task(self._send(key, sampler, prompt, sampling)))
        if len(requests) == self.members and not self._complete.done():
            self._complete.set_result(None)
        return await request.completion

    def close(self) -> None:
        """Cancel open requests."""
        for task in self._tasks:
            task.cancel()

    async def _send(self, key: _Key, sampler: Sampler, prompt: Prompt, sampling: Sampling) -> None:
        await asyncio.sleep(0)  # let the other rollouts of the group add their requests
        if self.wait_s:
            await asyncio.wait([self._complete], timeout=self.wait_s)
        requests = [request for request in self._pending.pop(key) if not request.completion.done()]
        await asyncio.gather(*(_answer(batch, sampler, prompt, sampling) for batch in _split_by_seed(requests)))


@dataclass(frozen=True, slots=True, eq=False)
class _BatchedSampler:
    """The sampler of a rollout's first turn."""

    sampler: Sampler
    batcher: RequestBatcher
    version: int

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
    except Exception as error:  # every rollout of the batch receives it
        for request in batch:
            if not request.completion.done():
                request.completion.set_exception(error)
        return
    for request, completion in zip(batch, completions, strict=True):
        if not request.completion.done():
            request.completion.set_result(completion)
