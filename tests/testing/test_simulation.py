"""The clock that does not wait, and the service that is not there."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from rlkit.errors import ServiceError
from rlkit.testing import DeadlockError, Fault, Latency, SimulatedTinker, World, run_virtual
from rlkit.types import Completion, Sampling, as_prompt


def test_virtual_hours_take_no_time() -> None:
    async def run() -> float:
        await asyncio.sleep(3600)
        async with asyncio.timeout(7200):
            await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == 7200


def test_endless_wait_is_an_error_at_once() -> None:
    with pytest.raises(DeadlockError, match="no timer is set"):
        run_virtual(asyncio.Event().wait())


def test_threads_are_waited_for_and_take_no_virtual_time() -> None:
    async def run() -> float:
        sleeping = asyncio.create_task(asyncio.sleep(100))
        await asyncio.to_thread(time.sleep, 0.05)
        now = asyncio.get_running_loop().time()
        await sleeping
        return now

    assert run_virtual(run()) == 0


def sample(
    world: World, *, seed: int, count: int = 1, latency: Latency | None = None
) -> tuple[list[Completion], float]:
    async def run() -> tuple[list[Completion], float]:
        async with SimulatedTinker(world=world, latency=latency) as service:
            sampler = await service.sampler(model="m")
            completions = await sampler.sample(as_prompt([1, 2]), Sampling(max_tokens=50), seed=seed, num_samples=count)
            return list(completions), asyncio.get_running_loop().time()

    return run_virtual(run())


def test_sample_i_of_a_seed_is_the_first_sample_of_seed_plus_i() -> None:
    together, _ = sample(World(), seed=5, count=3)
    for index in range(3):
        (single,), _ = sample(World(), seed=5 + index)
        np.testing.assert_array_equal(single.tokens, together[index].tokens)
        np.testing.assert_array_equal(single.logprobs, together[index].logprobs)
    (other_world,), _ = sample(World(seed=1), seed=5)
    assert other_world.tokens.tolist() != together[0].tokens.tolist()


def test_an_answer_takes_as_long_as_its_longest_sample() -> None:
    completions, seconds = sample(World(), seed=5, count=4, latency=Latency(first_s=1, token_s=0.5))
    assert seconds == pytest.approx(1 + 0.5 * max(len(completion.tokens) for completion in completions))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("429", "RateLimitError"),
        ("500", "InternalServerError"),
        ("408", "APITimeoutError"),
        ("broken", "RequestFailedError"),
        ("cancel", "cancelled the request"),
    ],
)
def test_fault_occurs_at_its_call_number(kind, message: str) -> None:
    world = World(faults=[Fault(kind, call="sample", call_number=2)])
    sample(world, seed=1)
    with pytest.raises(ServiceError, match=message):
        sample(world, seed=1)
    sample(world, seed=1)


def test_configured_share_of_calls_fails() -> None:
    world = World(faults=[Fault("500", call="sample", share=0.3)])
    failed = 0
    for _ in range(100):
        try:
            sample(world, seed=1)
        except ServiceError:
            failed += 1
    assert 15 < failed < 45


def test_slots_bound_concurrent_samples() -> None:
    world = World()

    async def run() -> float:
        async with SimulatedTinker(world=world, latency=Latency(first_s=1, token_s=0), slots=2) as service:
            sampler = await service.sampler(model="m")
            requests = (sampler.sample(as_prompt([1]), Sampling(max_tokens=5), seed=seed) for seed in range(6))
            await asyncio.gather(*requests)
            return asyncio.get_running_loop().time()

    assert run_virtual(run()) == 3
    assert world.max_concurrent_samples == 2


def test_request_cancelled_as_it_gets_a_slot_releases_it() -> None:
    async def run() -> float:
        async with SimulatedTinker(latency=Latency(first_s=1, token_s=0), slots=1) as service:
            sampler = await service.sampler(model="m")
            first, second, third = (
                asyncio.ensure_future(sampler.sample(as_prompt([1]), Sampling(max_tokens=5), seed=seed))
                for seed in range(3)
            )
            first.add_done_callback(lambda _: second.cancel())
            await third
            return asyncio.get_running_loop().time()

    assert run_virtual(run()) <= 3
