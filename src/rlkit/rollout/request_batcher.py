"""One request for the first turns of a group.

Invariant: what a rollout draws depends on its own seed only, whether its request went out alone or with others: sample
i of a request with seed s is drawn as sample 0 of one with seed s + i. The embedded engine promises this; another
service may draw other tokens, from the same distribution.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rlkit._util.stopwatch import Stopwatch, current_stopwatches, use_stopwatches
from rlkit.errors import ServiceError
from rlkit.policy import Sampler
from rlkit.types import Completion, Prompt, Sampling

type _Key = tuple[int, bytes, tuple[object, ...], Sampling]


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """One rollout's request, and where its completion goes."""

    seed: int
    answer: asyncio.Future[Completion]
    stopwatches: frozenset[Stopwatch]


@dataclass(slots=True, eq=False)
class RequestBatcher:
    """Puts requests together that are made in the same instant, for the same prompt, settings and weights.

    They are answered together, when the longest completion is done: for rollouts of one turn that costs nothing, since
    their group waits for the longest anyway; a conversation would wait at its first turn.
    """

    _gathering: dict[_Key, list[_Wanted]] = field(default_factory=dict[_Key, list[_Wanted]])
    _sent: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def gathered(self, sampler: Sampler) -> Sampler:
        """The same weights, behind the gathering of requests."""
        return _Gathered(sampler, self)

    async def sample(self, sampler: Sampler, prompt: Prompt, sampling: Sampling, seed: int) -> Completion:
        """One completion, asked for together with others."""
        key = (sampler.version, prompt.tokens.tobytes(), prompt.images, sampling)
        wanted = _Wanted(seed, asyncio.get_running_loop().create_future(), current_stopwatches())
        if key in self._gathering:
            self._gathering[key].append(wanted)
        else:
            self._gathering[key] = [wanted]
            task = asyncio.create_task(self._send(key, sampler, prompt, sampling))
            self._sent.add(task)
            task.add_done_callback(self._sent.discard)
        return await wanted.answer

    def close(self) -> None:
        """Drop what nobody waits for any more."""
        for task in self._sent:
            task.cancel()

    async def _send(self, key: _Key, sampler: Sampler, prompt: Prompt, sampling: Sampling) -> None:
        await asyncio.sleep(0)  # the group's other rollouts, begun in the same instant, get here now
        together = self._gathering.pop(key)
        runs = _runs([wanted for wanted in together if not wanted.answer.done()])
        await asyncio.gather(*(_ask(run, sampler, prompt, sampling) for run in runs))


@dataclass(frozen=True, slots=True, eq=False)
class _Gathered(Sampler):
    """The sampler that a rollout sees at its first turn."""

    of: Sampler
    coalescer: RequestBatcher

    @property
    def version(self) -> int:
        return self.of.version

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        if num_samples != 1:
            return await self.of.sample(prompt, sampling, seed=seed, num_samples=num_samples)
        return [await self.coalescer.sample(self.of, prompt, sampling, seed)]


def _runs(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """The requests in pieces whose seeds count up by one."""
    run = list[_Wanted]()
    for one in sorted(wanted, key=lambda w: w.seed):
        if run and one.seed != run[-1].seed + 1:
            yield run
            run = []
        run.append(one)
    if run:
        yield run


async def _ask(run: Sequence[_Wanted], sampler: Sampler, prompt: Prompt, sampling: Sampling) -> None:
    try:
        with use_stopwatches(stopwatch for wanted in run for stopwatch in wanted.stopwatches):
            completions = await sampler.sample(prompt, sampling, seed=run[0].seed, num_samples=len(run))
            if len(completions) != len(run):
                raise ServiceError(f"sampling: {len(run)} samples were asked for, and {len(completions)} came")
    except Exception as error:  # whatever it is, each of the rollouts gets it
        for wanted in run:
            if not wanted.answer.done():
                wanted.answer.set_exception(error)
        return
    for wanted, completion in zip(run, completions, strict=True):
        if not wanted.answer.done():
            wanted.answer.set_result(completion)
