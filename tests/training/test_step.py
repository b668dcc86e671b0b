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
from rlkit.training.schedule import SupplyLimits
from rlkit.training.step import StepRecipe, StepUpdate
from rlkit.types import Datum
from tests.builders import group

RATE = LearningRate(1e-4, "constant", 0, 1.0, 10)


async def prepare_group(draw: int = 0) -> PreparedGroup:
    return await Preparation({"env": GroupMean()}).prepare(group([1.0, 0.0, 0.5], draw=draw))


async def make_learner(service: SimulatedTinker) -> Learner:
    return await service.learner(model="simulated", lora=LoraConfig(), seed=0)


def make_recipe(*, groups: int = 2, substeps: int = 1, streaming: Streaming | None = None) -> StepRecipe:
    preparation = Preparation({"env": GroupMean()})
    limits = SupplyLimits(groups, 9)
    return StepRecipe(preparation, ImportanceSampling(), OptimizerConfig(), RATE, limits, substeps, streaming=streaming)


class WholeStepPreparation(Preparation):
    """Drops the first group of a step."""

    @property
    def needs_whole_steps(self) -> bool:
        return True

    def prepare_step(self, groups: Sequence[PreparedGroup]) -> list[PreparedGroup]:
        return list(groups[1:])


def run_on_virtual_time(main: Coroutine[Any, Any, None]) -> None:
    run_virtual(main)


@pytest.mark.parametrize("streaming", [None, "each_group", "ready_groups"])
@pytest.mark.parametrize("call", ["gradient", "step", "save"])
def test_cancelled_step_cancels_its_requests(call: str, streaming: Streaming | None) -> None:
    async def main() -> None:
        async with SimulatedTinker(world=World(faults=[Fault("hang", call=call)])) as service:  # type: ignore[arg-type]  one of its calls
            tasks_before = asyncio.all_tasks()
            update = StepUpdate(await make_learner(service), make_recipe(substeps=2, streaming=streaming), version=1)
            for draw in range(2):
                update.add(await prepare_group(draw), is_trained=True)
            update.finish()
            await asyncio.sleep(100)
            assert asyncio.all_tasks() > tasks_before, "something hangs"
            tokens = update.untrained_tokens
            update.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == tasks_before
            assert update.has_optimizer_steps
            assert update.untrained_tokens == tokens, "giving up trains nothing"

    run_on_virtual_time(main())


def test_failed_gradient_counts_as_untrained() -> None:
    async def main() -> None:
        async with SimulatedTinker(world=World(faults=[Fault("500", call="gradient")])) as service:
            update = StepUpdate(await make_learner(service), make_recipe(), version=1)
            update.add(await prepare_group(), is_trained=True)
            tokens = update.untrained_tokens
            assert tokens > 0
            update.finish()
            await asyncio.sleep(100)
            assert update.untrained_tokens == tokens

    run_on_virtual_time(main())


def test_resubmitted_step_gives_the_same_result() -> None:
    async def train_step(*, is_resubmitted: bool) -> dict[str, float]:
        async with SimulatedTinker() as service:
            update = StepUpdate(await make_learner(service), make_recipe(substeps=2), version=1)
            update.add(await prepare_group(0), is_trained=True)
            if is_resubmitted:
                await asyncio.sleep(0.1)
                update.cancel()
            update.add(await prepare_group(1), is_trained=True)
            if is_resubmitted:
                assert update.untrained_tokens > 0
                update.resubmit(await make_learner(service))
            update.finish()
            result = await update.wait(ServiceWatch(print, 600.0))
            assert result is not None
            assert update.untrained_tokens == 0
            return dict(result[1].metrics)

    async def main() -> None:
        assert await train_step(is_resubmitted=True) == await train_step(is_resubmitted=False)

    run_on_virtual_time(main())


class FakeLearner:
    """A service that notes what it is asked for, in order, and answers at once with the reports that it is given."""

    def __init__(
        self, gradients: Sequence[Mapping[str, float]] = (), steps: Sequence[Mapping[str, float]] = ()
    ) -> None:
        self.requests: list[tuple[str, float]] = []
        self.data: list[Datum] = []
        self._gradients, self._steps = list(gradients), list(steps)

    async def _answer[T](self, value: T) -> T:
        return value

    def gradient(self, data: Sequence[Datum], loss: Loss) -> Awaitable[Gradient]:
        self.requests.append(("gradient", len(data)))
        self.data += data
        report = self._gradients.pop(0) if self._gradients else {}
        return self._answer(Gradient([np.full(len(datum.targets), len(self.requests)) for datum in data], report))

    def step(self, optimizer: OptimizerConfig, *, learning_rate: float) -> Awaitable[Mapping[str, float]]:
        self.requests.append(("step", learning_rate))
        return self._answer(self._steps.pop(0) if self._steps else {})

    def sampler(self, version: int) -> Awaitable[Sampler]:
        self.requests.append(("sampler", version))
        return self._answer(cast("Sampler", f"sampler of version {version}"))

    def save(self, name: str, *, ttl_s: int | None) -> Awaitable[tuple[str, str]]:
        raise NotImplementedError


def list_requests(groups: int, *, of: int, substeps: int) -> list[tuple[str, float]]:
    """The requests of a step of `of` groups which gets `groups`, each of two sequences."""

    async def main() -> list[tuple[str, float]]:
        service = FakeLearner()
        update = StepUpdate(service, make_recipe(groups=of, substeps=substeps), version=3)
        for draw in range(groups):
            update.add(await prepare_group(draw), is_trained=True)
            assert not update.is_finished
        update.finish()
        assert update.is_finished
        assert await update.wait(ServiceWatch(print, 600.0)) is not None
        return service.requests

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
    assert list_requests(groups, of=of, substeps=substeps) == [*each, ("sampler", 3)]


def test_step_without_substeps_is_requested_once_complete() -> None:
    async def main() -> None:
        service = FakeLearner()
        update = StepUpdate(service, make_recipe(), version=1)
        for draw in range(2):
            update.add(await prepare_group(draw), is_trained=True)
        assert (service.requests, update.has_optimizer_steps) == ([], False)
        assert update.untrained_tokens == 2 * (await prepare_group()).tokens
        update.finish()
        assert update.has_optimizer_steps
        await update.wait(ServiceWatch(print, 600.0))
        assert update.untrained_tokens == 0

    asyncio.run(main())


def test_group_that_is_not_trained_sends_no_data() -> None:
    async def main() -> None:
        service = FakeLearner()
        update = StepUpdate(service, make_recipe(), version=1)
        update.add(await prepare_group(0), is_trained=False)
        assert update.untrained_tokens == 0
        trained_group = await prepare_group(1)
        update.add(trained_group, is_trained=True)
        update.finish()
        result = await update.wait(ServiceWatch(print, 600.0))
        assert result is not None
        assert service.data == list(trained_group.data)
        assert result[1].groups == (trained_group,)

    asyncio.run(main())


@pytest.mark.parametrize("substeps", [1, 2])
def test_step_without_data_sends_no_request(substeps: int) -> None:
    async def main() -> None:
        service = FakeLearner()
        update = StepUpdate(service, make_recipe(substeps=substeps), version=1)
        for draw in range(2):
            update.add(await Preparation({"env": GroupMean()}).prepare(group([1.0, 1.0], draw=draw)), is_trained=True)
        update.finish()
        assert await update.wait(ServiceWatch(print, 600.0)) is None
        assert (service.requests, update.has_optimizer_steps, update.untrained_tokens) == ([], False, 0)

    asyncio.run(main())


def test_learning_rate_follows_the_step_number() -> None:
    async def main() -> None:
        service, rate = FakeLearner(), LearningRate(1.0, "linear", 2, 0.0, 10)
        update = StepUpdate(service, replace(make_recipe(), rate=rate), version=2)
        update.add(await prepare_group(), is_trained=True)
        update.finish()
        result = await update.wait(ServiceWatch(print, 600.0))
        assert result is not None
        assert ("step", rate.at(2)) in service.requests
        assert result[1].learning_rate == rate.at(2) == pytest.approx(2 / 3)

    asyncio.run(main())


def test_metrics_of_several_requests_are_combined() -> None:
    async def main() -> None:
        gradients = [
            {"loss:sum": 1.0, "ratio:min": 0.5, "ratio:max": 2.0, "kl": 0.1, "first": 7.0},
            {"loss:sum": 2.0, "ratio:min": 0.75, "ratio:max": 3.0, "kl": 0.4},
        ]
        service = FakeLearner(gradients, [{"norm": 1.0, "clipped:sum": 1.0}, {"norm": 3.0, "clipped:sum": 1.0}])
        update = StepUpdate(service, make_recipe(groups=3, substeps=2), version=1)
        groups = [await prepare_group(draw) for draw in range(3)]
        for prepared in groups:
            update.add(prepared, is_trained=True)
        update.finish()
        result = await update.wait(ServiceWatch(print, 600.0))
        assert result is not None
        sampler, update_result = result
        assert sampler == "sampler of version 1"
        assert update_result.groups == tuple(groups)
        assert [row.tolist() for row in update_result.logprobs] == [[1.0] * 3] * 4 + [
            [3.0] * 3
        ] * 2  # in the order of the data
        assert dict(update_result.metrics) == pytest.approx(
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


def test_groups_are_finished_before_the_first_request() -> None:
    async def main() -> None:
        all_groups = [await prepare_group(draw) for draw in range(3)]
        service = FakeLearner()
        recipe = replace(make_recipe(groups=3, substeps=2), preparation=WholeStepPreparation({}))
        assert not recipe.is_streaming
        update = StepUpdate(service, recipe, version=1)
        for prepared in all_groups:
            update.add(prepared, is_trained=True)
        assert (service.requests, update.untrained_tokens) == ([], 3 * all_groups[0].tokens)
        update.finish()
        assert update.untrained_tokens == 2 * all_groups[0].tokens
        assert await update.wait(ServiceWatch(print, 600.0)) is not None
        assert service.data == [datum for prepared in all_groups[1:] for datum in prepared.data]
        assert update.untrained_tokens == 0

    asyncio.run(main())


def test_earlier_failure_of_a_gradient_fails_the_step() -> None:
    async def main() -> None:
        async with SimulatedTinker(world=World(faults=[Fault("500", call="gradient")])) as service:
            update = StepUpdate(await make_learner(service), make_recipe(), version=1)
            update.add(await prepare_group(), is_trained=True)
            update.finish()
            await asyncio.sleep(100)
            with pytest.raises(ServiceError):
                await update.wait(ServiceWatch(print, 600.0))
            update.cancel()

    run_on_virtual_time(main())


@pytest.mark.parametrize(
    ("settings", "is_streaming"),
    [
        ({}, False),
        ({"substeps": 2}, True),
        ({"streaming": "ready_groups"}, True),
        ({"streaming": "ready_groups", "substeps": 2}, True),
        ({"streaming": "ready_groups", "preparation": WholeStepPreparation({})}, False),
        ({"substeps": 2, "preparation": WholeStepPreparation({})}, False),
    ],
)
def test_only_divisible_steps_are_streamed(settings: dict[str, Any], is_streaming: bool) -> None:
    assert bool(replace(make_recipe(), **settings).is_streaming) == is_streaming


def test_streaming_sends_ready_groups_together() -> None:
    async def main() -> None:
        service = FakeLearner()
        update = StepUpdate(service, replace(make_recipe(groups=4), streaming=cast("Any", "ready_groups")), version=1)
        update.add(await prepare_group(0), is_trained=True)
        assert service.requests == [("gradient", 2)]
        for draw in (1, 2):
            update.add(await prepare_group(draw), is_trained=True)
        assert service.requests == [("gradient", 2)]  # which is not answered yet
        for _ in range(5):
            await asyncio.sleep(0)
        assert service.requests == [("gradient", 2), ("gradient", 4)]
        update.add(await prepare_group(3), is_trained=True)
        update.finish()
        assert await update.wait(ServiceWatch(print, 600.0)) is not None
        assert service.requests[1:] == [("gradient", 4), ("gradient", 2), ("step", RATE.at(1)), ("sampler", 1)]

    asyncio.run(main())
