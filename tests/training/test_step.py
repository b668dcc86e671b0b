"""Steps in the making, against the simulated service on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from rlkit.algorithms.datums import Preparation, PreparedGroup
from rlkit.algorithms.estimators import GroupMean
from rlkit.algorithms.losses import ImportanceSampling, Loss
from rlkit.algorithms.lr_schedule import LearningRate
from rlkit.algorithms.schedules import Streaming
from rlkit.config.schema.objective import LoraConfig, OptimizerConfig
from rlkit.errors import ServiceError
from rlkit.policy import Sampler
from rlkit.service import Gradient, Learner
from rlkit.service.watch import ServiceWatch
from rlkit.testing import Fault, SimulatedTinker, World, run_virtual
from rlkit.training.step import StepRecipe, StepUpdate
from rlkit.types import Datum
from tests.builders import group

RATE = LearningRate(1e-4, "constant", 0, 1.0, 10)


async def prepared(draw: int = 0) -> PreparedGroup:
    return await Preparation({"env": GroupMean()}).prepare(group([1.0, 0.0, 0.5], draw=draw))


async def learner(service: SimulatedTinker) -> Learner:
    return await service.learner(model="simulated", lora=LoraConfig(), seed=0)


def recipe(*, substeps: int = 1, streaming: Streaming | None = None) -> StepRecipe:
    return StepRecipe(ImportanceSampling(), OptimizerConfig(), RATE, 2, substeps, streaming=streaming)


def on_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


@pytest.mark.parametrize("streaming", [None, "each_group", "ready_groups"])
@pytest.mark.parametrize("call", ["gradient", "step", "save"])
def test_what_a_step_asked_for_is_given_up_when_it_is_withdrawn(call: str, streaming: Streaming | None) -> None:
    async def main() -> None:
        async with SimulatedTinker(world=World(faults=[Fault("hang", call=call)])) as service:  # type: ignore[arg-type]  one of its calls
            before = asyncio.all_tasks()
            update = StepUpdate(await learner(service), recipe(substeps=2, streaming=streaming), version=1)
            for draw in range(2):
                update.add(await prepared(draw), is_trained=True)
            update.finish()
            await asyncio.sleep(100)
            assert asyncio.all_tasks() > before, "something hangs"
            tokens = update.untrained_tokens
            update.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == before
            assert update.has_optimizer_steps
            assert update.untrained_tokens == tokens, "giving up trains nothing"

    on_virtual_time(main())


def test_a_gradient_that_fails_has_trained_nothing() -> None:
    async def main() -> None:
        async with SimulatedTinker(world=World(faults=[Fault("500", call="gradient")])) as service:
            update = StepUpdate(await learner(service), recipe(), version=1)
            update.add(await prepared(), is_trained=True)
            tokens = update.untrained_tokens
            assert tokens > 0
            update.finish()
            await asyncio.sleep(100)
            assert update.untrained_tokens == tokens

    on_virtual_time(main())


def test_a_step_that_was_withdrawn_can_be_asked_for_again_and_is_the_same() -> None:
    async def taken(*, again: bool) -> dict[str, float]:
        async with SimulatedTinker() as service:
            update = StepUpdate(await learner(service), recipe(substeps=2), version=1)
            update.add(await prepared(0), is_trained=True)
            if again:
                await asyncio.sleep(0.1)
                update.cancel()
            update.add(await prepared(1), is_trained=True)
            if again:
                assert update.untrained_tokens > 0
                update.resubmit(await learner(service))
            update.finish()
            result = await update.wait(ServiceWatch(print, 600.0))
            assert result is not None
            assert update.untrained_tokens == 0
            return dict(result[1].metrics)

    async def main() -> None:
        assert await taken(again=True) == await taken(again=False)

    on_virtual_time(main())


class FakeLearner:
    """A service that notes what it is asked for, in order, and answers at once with the reports that it is given."""

    def __init__(
        self, gradients: Sequence[Mapping[str, float]] = (), steps: Sequence[Mapping[str, float]] = ()
    ) -> None:
        self.asked: list[tuple[str, float]] = []
        self.data: list[Datum] = []
        self._gradients, self._steps = list(gradients), list(steps)

    async def _answer[T](self, value: T) -> T:
        return value

    def gradient(self, data: Sequence[Datum], loss: Loss) -> Awaitable[Gradient]:
        self.asked.append(("gradient", len(data)))
        self.data += data
        report = self._gradients.pop(0) if self._gradients else {}
        return self._answer(Gradient([np.full(len(datum.targets), len(self.asked)) for datum in data], report))

    def step(self, optimizer: OptimizerConfig, *, learning_rate: float) -> Awaitable[Mapping[str, float]]:
        self.asked.append(("step", learning_rate))
        return self._answer(self._steps.pop(0) if self._steps else {})

    def sampler(self, version: int) -> Awaitable[Sampler]:
        self.asked.append(("sampler", version))
        return self._answer(cast("Sampler", f"sampler of version {version}"))

    def save(self, name: str, *, ttl_s: int | None) -> Awaitable[tuple[str, str]]:
        raise NotImplementedError


def asked_for(groups: int, *, of: int, substeps: int) -> list[tuple[str, float]]:
    """The requests of a step of `of` groups which gets `groups`, each of two sequences."""

    async def main() -> list[tuple[str, float]]:
        service = FakeLearner()
        update = StepUpdate(service, replace(recipe(substeps=substeps), groups=of), version=3)
        for draw in range(groups):
            update.add(await prepared(draw), is_trained=True)
            assert not update.is_finished
        update.finish()
        assert update.is_finished
        assert await update.wait(ServiceWatch(print, 600.0)) is not None
        return service.asked

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("groups", "of", "substeps", "sizes"),
    [
        (4, 4, 1, [8]),
        (4, 4, 2, [4, 4]),
        (3, 3, 2, [4, 2]),
        (4, 4, 4, [2, 2, 2, 2]),
        (5, 4, 2, [4, 6]),  # the last takes whatever comes
        (1, 4, 2, [2]),  # the tasks have run out
    ],
)
def test_each_substep_takes_an_optimiser_step_on_an_equal_share(
    groups: int, of: int, substeps: int, sizes: list[int]
) -> None:
    each = [request for size in sizes for request in (("gradient", size), ("step", RATE.at(3)))]
    assert asked_for(groups, of=of, substeps=substeps) == [*each, ("sampler", 3)]


def test_a_step_without_substeps_is_asked_for_once_it_is_whole() -> None:
    async def main() -> None:
        service = FakeLearner()
        update = StepUpdate(service, recipe(), version=1)
        for draw in range(2):
            update.add(await prepared(draw), is_trained=True)
        assert (service.asked, update.has_optimizer_steps) == ([], False)
        assert update.untrained_tokens == 2 * (await prepared()).tokens
        update.finish()
        assert update.has_optimizer_steps
        await update.wait(ServiceWatch(print, 600.0))
        assert update.untrained_tokens == 0

    asyncio.run(main())


def test_a_group_that_does_not_count_is_not_trained_on() -> None:
    async def main() -> None:
        service = FakeLearner()
        update = StepUpdate(service, recipe(), version=1)
        update.add(await prepared(0), is_trained=False)
        assert update.untrained_tokens == 0
        own = await prepared(1)
        update.add(own, is_trained=True)
        update.finish()
        result = await update.wait(ServiceWatch(print, 600.0))
        assert result is not None
        assert service.data == list(own.data) == list(result[1].data)

    asyncio.run(main())


@pytest.mark.parametrize("substeps", [1, 2])
def test_a_step_that_has_nothing_to_train_on_asks_for_nothing(substeps: int) -> None:
    async def main() -> None:
        service = FakeLearner()
        update = StepUpdate(service, recipe(substeps=substeps), version=1)
        for draw in range(2):
            update.add(await Preparation({"env": GroupMean()}).prepare(group([1.0, 1.0], draw=draw)), is_trained=True)
        update.finish()
        assert await update.wait(ServiceWatch(print, 600.0)) is None
        assert (service.asked, update.has_optimizer_steps, update.untrained_tokens) == ([], False, 0)

    asyncio.run(main())


def test_the_rate_of_a_step_is_that_of_its_number() -> None:
    async def main() -> None:
        service, rate = FakeLearner(), LearningRate(1.0, "linear", 2, 0.0, 10)
        update = StepUpdate(service, replace(recipe(), rate=rate), version=2)
        update.add(await prepared(), is_trained=True)
        update.finish()
        result = await update.wait(ServiceWatch(print, 600.0))
        assert result is not None
        assert ("step", rate.at(2)) in service.asked
        assert result[1].learning_rate == rate.at(2) == pytest.approx(2 / 3)

    asyncio.run(main())


def test_what_several_requests_report_is_one_report() -> None:
    async def main() -> None:
        gradients = [
            {"loss:sum": 1.0, "ratio:min": 0.5, "ratio:max": 2.0, "kl": 0.1, "first": 7.0},
            {"loss:sum": 2.0, "ratio:min": 0.75, "ratio:max": 3.0, "kl": 0.4},
        ]
        service = FakeLearner(gradients, [{"norm": 1.0, "clipped:sum": 1.0}, {"norm": 3.0, "clipped:sum": 1.0}])
        update = StepUpdate(service, replace(recipe(substeps=2), groups=3), version=1)
        groups = [await prepared(draw) for draw in range(3)]
        for own in groups:
            update.add(own, is_trained=True)
        update.finish()
        result = await update.wait(ServiceWatch(print, 600.0))
        assert result is not None
        sampler, done = result
        assert sampler == "sampler of version 1"
        assert list(done.data) == [datum for own in groups for datum in own.data]
        assert [row.tolist() for row in done.logprobs] == [[1.0] * 3] * 4 + [[3.0] * 3] * 2  # in the order of the data
        assert dict(done.metrics) == pytest.approx(
            {
                "loss:sum": 3.0,
                "ratio:min": 0.5,
                "ratio:max": 3.0,
                "kl": (4 * 0.1 + 2 * 0.4) / 6,  # a sequence counts as much in either
                "first": 7.0,
                "norm": 2.0,
                "clipped:sum": 2.0,
            }
        )

    asyncio.run(main())


def test_what_is_left_to_do_with_all_groups_is_done_before_anything_is_asked_for() -> None:
    async def main() -> None:
        own = [await prepared(draw) for draw in range(3)]

        def all_but_the_first(groups: Sequence[PreparedGroup]) -> Sequence[PreparedGroup]:
            assert list(groups) == own
            return groups[1:]

        service = FakeLearner()
        whole = replace(recipe(substeps=2), groups=3, finish_groups=all_but_the_first)
        assert not whole.is_streaming
        update = StepUpdate(service, whole, version=1)
        for one in own:
            update.add(one, is_trained=True)
        assert (service.asked, update.untrained_tokens) == ([], 3 * own[0].tokens)
        update.finish()
        assert update.untrained_tokens == 2 * own[0].tokens
        assert await update.wait(ServiceWatch(print, 600.0)) is not None
        assert service.data == [datum for one in own[1:] for datum in one.data]
        assert update.untrained_tokens == 0

    asyncio.run(main())


def test_a_gradient_that_failed_long_ago_fails_the_step() -> None:
    async def main() -> None:
        async with SimulatedTinker(world=World(faults=[Fault("500", call="gradient")])) as service:
            update = StepUpdate(await learner(service), recipe(), version=1)
            update.add(await prepared(), is_trained=True)
            update.finish()
            await asyncio.sleep(100)
            with pytest.raises(ServiceError):
                await update.wait(ServiceWatch(print, 600.0))
            update.cancel()

    on_virtual_time(main())


@pytest.mark.parametrize(
    ("settings", "is_streaming"),
    [
        ({}, False),
        ({"substeps": 2}, True),
        ({"streaming": "ready_groups"}, True),
        ({"streaming": "ready_groups", "substeps": 2}, True),
        ({"streaming": "ready_groups", "finish_groups": lambda groups: groups}, False),
        ({"substeps": 2, "finish_groups": lambda groups: groups}, False),
    ],
)
def test_a_step_is_asked_for_before_it_is_whole_only_in_parts(settings: dict[str, Any], is_streaming: bool) -> None:
    assert bool(replace(recipe(), **settings).is_streaming) == is_streaming


def test_what_streams_is_asked_for_as_it_comes_and_what_comes_meanwhile_goes_together() -> None:
    async def main() -> None:
        service = FakeLearner()
        update = StepUpdate(service, replace(recipe(), groups=4, streaming=cast("Any", "ready_groups")), version=1)
        update.add(await prepared(0), is_trained=True)
        assert service.asked == [("gradient", 2)]
        for draw in (1, 2):
            update.add(await prepared(draw), is_trained=True)
        assert service.asked == [("gradient", 2)]  # which is not answered yet
        for _ in range(5):
            await asyncio.sleep(0)
        assert service.asked == [("gradient", 2), ("gradient", 4)]
        update.add(await prepared(3), is_trained=True)
        update.finish()
        assert await update.wait(ServiceWatch(print, 600.0)) is not None
        assert service.asked[1:] == [("gradient", 4), ("gradient", 2), ("step", RATE.at(1)), ("sampler", 1)]

    asyncio.run(main())
