from __future__ import annotations

import asyncio

import pytest

from rlkit._util.stopwatch import Stopwatch, use_stopwatches
from rlkit.envs.harbor.phases import Gates, PhaseLimits, gates
from rlkit.testing import run_virtual


def test_no_more_trials_than_allowed_are_in_a_phase() -> None:
    in_phase: dict[str, list[int]] = {"start": [0, 0], "play": [0, 0], "verify": [0, 0]}

    async def trial(own: Gates) -> None:
        passing = own.enter()
        for phase, now in in_phase.items():
            await getattr(passing, phase)()
            now[0] += 1
            now[1] = max(now)
            await asyncio.sleep(1)
            now[0] -= 1
        passing.leave()

    async def main() -> None:
        own = Gates(PhaseLimits(starting=4, playing=3, verifying=2))
        await asyncio.gather(*(trial(own) for _ in range(9)))

    run_virtual(main())
    assert [most for _, most in in_phase.values()] == [4, 3, 2]


def test_those_that_wait_to_play_have_started() -> None:
    async def main() -> list[float]:
        own, clock, began = Gates(PhaseLimits(playing=1)), asyncio.get_running_loop().time, list[float]()

        async def trial() -> None:
            passing = own.enter()
            await passing.start()
            await asyncio.sleep(60)
            await passing.play()
            began.append(clock())
            await asyncio.sleep(10)
            passing.leave()

        now_s = clock()
        await asyncio.gather(*(trial() for _ in range(3)))
        return [one - now_s for one in began]

    assert run_virtual(main()) == pytest.approx([60, 70, 80])


def test_starts_are_apart() -> None:
    async def main() -> list[float]:
        own, clock, starts = Gates(PhaseLimits(starts_per_s=2)), asyncio.get_running_loop().time, list[float]()

        async def trial() -> None:
            await own.enter().start()
            starts.append(clock())

        began = clock()
        await asyncio.gather(*(trial() for _ in range(4)))
        return [start - began for start in starts]

    assert run_virtual(main()) == pytest.approx([0, 0.5, 1, 1.5])


def test_waiting_at_a_gate_is_not_the_rollouts_own_time() -> None:
    async def main() -> tuple[float, float]:
        own = Gates(PhaseLimits(starting=1))
        first = own.enter()
        await first.start()
        asyncio.get_running_loop().call_later(5, first.leave)
        stopwatch, passing = Stopwatch(), own.enter()
        with use_stopwatches([stopwatch]):
            await passing.start()
            await asyncio.sleep(2)
        return stopwatch.played_s, passing.waited_s

    assert run_virtual(main()) == pytest.approx((2, 5))


def test_what_is_held_is_given_back_once_and_by_whoever_is_cancelled() -> None:
    async def main() -> None:
        own = Gates(PhaseLimits(verifying=1))
        passing = own.enter()
        await passing.verify()
        waiting = asyncio.create_task(own.enter().verify())
        await asyncio.sleep(1)
        waiting.cancel()
        passing.leave()
        passing.leave()
        again = own.enter()
        await asyncio.wait_for(again.verify(), 1)
        blocked = asyncio.create_task(own.enter().verify())
        await asyncio.sleep(1)
        assert not blocked.done()
        blocked.cancel()

    run_virtual(main())


def test_tasks_with_the_same_limits_share_their_gates() -> None:
    async def main() -> None:
        assert gates("harbor", PhaseLimits(1)) is gates("harbor", PhaseLimits(1))
        assert gates("harbor", PhaseLimits(1)) is not gates("harbor", PhaseLimits(2))

    asyncio.run(main())
