"""Steps in the making, against the simulated service on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rlkit.advantages import group_mean
from rlkit.batch import Preparation, Prepared
from rlkit.config.objective import OptimizerConfig
from rlkit.config.schema import LoraConfig
from rlkit.losses import Loss
from rlkit.rates import LearningRate
from rlkit.service import Learner
from rlkit.service.watch import Watch
from rlkit.testing import Fault, SimulatedTinker, World, run_virtual
from rlkit.update import Recipe, StepUpdate
from tests.builders import group

RATE = LearningRate(1e-4, "constant", 0, 1.0, 10)


async def prepared(draw: int = 0) -> Prepared:
    return await Preparation({"env": group_mean}).prepare(group([1.0, 0.0, 0.5], draw=draw))


async def learner(service: SimulatedTinker) -> Learner:
    return await service.learner(model="simulated", lora=LoraConfig(), seed=0)


def recipe(*, substeps: int = 1, streaming: bool = False) -> Recipe:
    return Recipe(Loss("importance_sampling"), OptimizerConfig(), RATE, 2, substeps, streaming=streaming)


def on_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("call", ["gradient", "step", "save"])
def test_what_a_step_asked_for_is_given_up_when_it_is_withdrawn(call: str, streaming: bool) -> None:
    async def main() -> None:
        async with SimulatedTinker(world=World(faults=[Fault("hang", call=call)])) as service:  # type: ignore[arg-type]  one of its calls
            before = asyncio.all_tasks()
            update = StepUpdate(await learner(service), recipe(substeps=2, streaming=streaming), version=1)
            for draw in range(2):
                update.add(await prepared(draw), counts=True)
            update.finish()
            await asyncio.sleep(100)
            assert asyncio.all_tasks() > before, "something hangs"
            tokens = update.untrained
            update.withdraw()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == before
            assert update.stepped
            assert update.untrained == tokens, "giving up trains nothing"

    on_virtual_time(main())


def test_a_gradient_that_fails_has_trained_nothing() -> None:
    async def main() -> None:
        async with SimulatedTinker(world=World(faults=[Fault("500", call="gradient")])) as service:
            update = StepUpdate(await learner(service), recipe(), version=1)
            update.add(await prepared(), counts=True)
            tokens = update.untrained
            assert tokens > 0
            update.finish()
            await asyncio.sleep(100)
            assert update.untrained == tokens

    on_virtual_time(main())


def test_a_step_that_was_withdrawn_can_be_asked_for_again_and_is_the_same() -> None:
    async def taken(*, again: bool) -> dict[str, float]:
        async with SimulatedTinker() as service:
            update = StepUpdate(await learner(service), recipe(substeps=2), version=1)
            update.add(await prepared(0), counts=True)
            if again:
                await asyncio.sleep(0.1)
                update.withdraw()
            update.add(await prepared(1), counts=True)
            if again:
                assert update.untrained > 0
                update.submit_again(await learner(service))
            update.finish()
            result = await update.result(Watch(print, 600.0))
            assert result is not None
            assert update.untrained == 0
            return dict(result[1].metrics)

    async def main() -> None:
        assert await taken(again=True) == await taken(again=False)

    on_virtual_time(main())
