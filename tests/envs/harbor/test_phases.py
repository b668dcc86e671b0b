from __future__ import annotations

import asyncio

import pytest

from rlkit._util.stopwatch import Stopwatch, use_stopwatches
from rlkit.envs.harbor.phases import GatePass, Gates, PhaseLimits, get_gates
from rlkit.testing import run_virtual


def test_no_more_trials_than_allowed_are_in_a_phase() -> None:
    in_phase: dict[str, list[int]] = {"start": [0, 0], "play": [0, 0], "verify": [0, 0]}

    async def trial(gates: Gates) -> None:
        gate_pass = GatePass(gates)
        for phase, now in in_phase.items():
            await getattr(gate_pass, f"wait_to_{phase}")()
            now[0] += 1
            now[1] = max(now)
            await asyncio.sleep(1)
            now[0] -= 1
        gate_pass.release()

    async def main() -> None:
        gates = Gates(PhaseLimits(starting=4, playing=3, verifying=2))
        await asyncio.gather(*(trial(gates) for _ in range(9)))

    run_virtual(main())
    assert [maximum for _, maximum in in_phase.values()] == [4, 3, 2]


def test_trials_start_before_they_wait_to_play() -> None:
    async def main() -> list[float]:
        gates, clock, began = Gates(PhaseLimits(playing=1)), asyncio.get_running_loop().time, list[float]()

        async def trial() -> None:
            gate_pass = GatePass(gates)
            await gate_pass.wait_to_start()
            await asyncio.sleep(60)
            await gate_pass.wait_to_play()
            began.append(clock())
            await asyncio.sleep(10)
            gate_pass.release()

        now_s = clock()
        await asyncio.gather(*(trial() for _ in range(3)))
        return [start_s - now_s for start_s in began]

    assert run_virtual(main()) == pytest.approx([60, 70, 80])


def test_starts_are_apart() -> None:
    async def main() -> list[float]:
        gates, clock, starts = Gates(PhaseLimits(starts_per_s=2)), asyncio.get_running_loop().time, list[float]()

        async def trial() -> None:
            await GatePass(gates).wait_to_start()
            starts.append(clock())

        began = clock()
        await asyncio.gather(*(trial() for _ in range(4)))
        return [start - began for start in starts]

    assert run_virtual(main()) == pytest.approx([0, 0.5, 1, 1.5])


def test_waiting_at_a_gate_does_not_count_as_rollout_time() -> None:
    async def main() -> tuple[float, float]:
        gates = Gates(PhaseLimits(starting=1))
        first = GatePass(gates)
        await first.wait_to_start()
        asyncio.get_running_loop().call_later(5, first.release)
        stopwatch, gate_pass = Stopwatch(), GatePass(gates)
        with use_stopwatches([stopwatch]):
            await gate_pass.wait_to_start()
            await asyncio.sleep(2)
        return stopwatch.played_s, gate_pass.waited_s

    assert run_virtual(main()) == pytest.approx((2, 5))


def test_a_gate_is_released_once_and_on_cancellation() -> None:
    async def main() -> None:
        gates = Gates(PhaseLimits(verifying=1))
        gate_pass = GatePass(gates)
        await gate_pass.wait_to_verify()
        waiting = asyncio.create_task(GatePass(gates).wait_to_verify())
        await asyncio.sleep(1)
        waiting.cancel()
        gate_pass.release()
        gate_pass.release()
        again = GatePass(gates)
        await asyncio.wait_for(again.wait_to_verify(), 1)
        blocked = asyncio.create_task(GatePass(gates).wait_to_verify())
        await asyncio.sleep(1)
        assert not blocked.done()
        blocked.cancel()

    run_virtual(main())


def test_tasks_with_the_same_limits_share_their_gates() -> None:
    async def main() -> None:
        assert get_gates(PhaseLimits(1)) is get_gates(PhaseLimits(1))
        assert get_gates(PhaseLimits(1)) is not get_gates(PhaseLimits(2))

    asyncio.run(main())
