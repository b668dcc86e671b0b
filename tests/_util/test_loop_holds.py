"""A rollout that holds the event loop is charged for it, its siblings are not, and its line is named."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rlkit
from rlkit._util import loop_holds as loop_holds_module
from rlkit._util.frames import Place
from rlkit._util.loop_holds import REPORTED_HOLD_S, attribute_holds, loop_holds, processor_wait_s
from rlkit._util.stopwatch import Stopwatch, use_stopwatches
from rlkit.cli.app import app
from rlkit.rollout.runner import play_env
from rlkit.service.watch import SILENCE_S, ServiceWatch
from rlkit.testing import ScriptedPolicy, VirtualClock, run_virtual
from rlkit.types import Outcome
from tests.simulation import Simulation, Word

HERE = __file__


def hold(seconds: float) -> None:
    """Block the loop, like `time.sleep` on a real clock."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClock)
    loop.jump(seconds)


class Blocking(rlkit.Env):
    """Holds the loop, so many times, and awaits in between."""

    def __init__(self, seconds: float, times: int = 1) -> None:
        self.seconds = seconds
        self.times = times

    async def rollout(self, policy: rlkit.Policy) -> float:
        for _ in range(self.times):
            hold(self.seconds)
            await asyncio.sleep(0.01)
        return 1.0


class AtOnce(Blocking):
    """Holds the loop in its only step."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        hold(self.seconds)
        return 1.0


class InTask(Blocking):
    """Holds the loop in a task of its own."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        return await asyncio.create_task(super().rollout(policy))


class Waiting(rlkit.Env):
    """Takes a second, of which it holds nothing."""

    async def rollout(self, policy: rlkit.Policy) -> float:
        await asyncio.sleep(1)
        return 1.0


def play(*envs: rlkit.Env, timeout_s: float) -> list[tuple[Outcome | None, str | None]]:
    """Side by side, on virtual time."""

    async def main() -> list[tuple[Outcome | None, str | None]]:
        policy = ScriptedPolicy([])
        return await asyncio.gather(*(play_env(env, policy, timeout_s=timeout_s) for env in envs))

    return run_virtual(main())


@pytest.mark.parametrize("kind", [Blocking, AtOnce, InTask])
def test_siblings_of_a_rollout_that_blocks_the_loop_are_not_charged(kind: type[Blocking]) -> None:
    played = play(*(kind(3) for _ in range(8)), *(Waiting() for _ in range(24)), timeout_s=4)
    assert [error for _, error in played] == [None] * 32


@pytest.mark.parametrize("kind", [Blocking, AtOnce, InTask])
def test_the_rollout_that_blocks_the_loop_is_charged(kind: type[Blocking]) -> None:
    (_, late), *others = play(kind(5), Waiting(), Waiting(), timeout_s=4)
    assert late == "the rollout took longer than 4 s (timeout_s)"
    assert [error for _, error in others] == [None, None]


def test_holds_of_one_rollout_add_up() -> None:
    (_, late), (_, other) = play(Blocking(1.5, times=4), Waiting(), timeout_s=4)
    assert (late, other) == ("the rollout took longer than 4 s (timeout_s)", None)


def test_an_endless_sibling_is_still_late() -> None:
    class Endless(rlkit.Env):
        async def rollout(self, policy: rlkit.Policy) -> float:
            await asyncio.Event().wait()
            return 1.0

    (_, endless), *_ = play(Endless(), *(Blocking(3) for _ in range(8)), timeout_s=4)
    assert endless == "the rollout took longer than 4 s (timeout_s)"


@pytest.mark.parametrize("held_s", [10.0, 2 * SILENCE_S])
def test_a_hold_within_a_service_outage_is_excluded_once(held_s: float) -> None:
    async def main() -> tuple[float, float]:
        watch, stopwatch = ServiceWatch(lambda note: None, timeout_s=3600), Stopwatch()

        async def sibling() -> float:
            await asyncio.sleep(100)
            hold(held_s)
            return 1.0

        class Sibling(rlkit.Env):
            async def rollout(self, policy: rlkit.Policy) -> float:
                return await sibling()

        other = asyncio.create_task(play_env(Sibling(), ScriptedPolicy([]), timeout_s=1000))
        with use_stopwatches([stopwatch]):
            await watch.call(lambda: asyncio.sleep(600 + held_s), "sampling")
        await asyncio.sleep(10)
        await other
        return stopwatch.played_s, asyncio.get_running_loop().time()

    played_s, taken_s = run_virtual(main())
    assert (played_s, taken_s) == pytest.approx((10, 610 + held_s))


def test_a_hold_is_no_service_outage() -> None:
    async def main() -> float:
        watch = ServiceWatch(lambda note: None, timeout_s=3600)

        class Asking(rlkit.Env):
            async def rollout(self, policy: rlkit.Policy) -> float:
                asking = asyncio.create_task(watch.call(lambda: asyncio.sleep(20), "sampling"))
                await asyncio.sleep(0)
                hold(SILENCE_S)
                await asking
                return 1.0

        _, error = await play_env(Asking(), ScriptedPolicy([]), timeout_s=SILENCE_S)
        assert error == f"the rollout took longer than {SILENCE_S:g} s (timeout_s)"  # it held the loop itself
        return watch.total_silence_s(loop_holds().now_s)

    assert run_virtual(main()) == 0


def test_environment_code_outside_of_a_rollout_is_not_charged() -> None:
    async def main() -> float:
        stopwatch = Stopwatch()
        with attribute_holds("words"):
            hold(5)
        return stopwatch.played_s

    assert run_virtual(main()) == 0


def test_a_hold_within_a_timed_part_is_attributed_to_the_environment() -> None:
    async def main() -> list[str]:
        holds, names = loop_holds(), list[str]()
        with holds.watch(lambda loop_hold: names.append(loop_hold.env)):
            for charged in ((Stopwatch("words"), Stopwatch()), (Stopwatch(), Stopwatch("words")), (Stopwatch(),)):
                assert holds.begin(charged)
                hold(1)
                holds.end()
            await asyncio.sleep(0)
        return names

    assert run_virtual(main()) == ["words", "words"]


def test_a_step_that_waited_for_a_processor_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([7.0, 10.0, 10.8])
    monkeypatch.setattr("rlkit._util.loop_holds.processor_wait_s", lambda native_id: next(waits))
    monkeypatch.setattr("rlkit._util.loop_holds._LOOK_S", 1000.0)  # no look disturbs the count

    async def main() -> list[float]:
        holds, seconds = loop_holds(), list[float]()
        with holds.watch(lambda loop_hold: seconds.append(loop_hold.seconds)):
            for _ in range(2):
                assert holds.begin((Stopwatch("words"),))
                hold(4)
                holds.end()
            await asyncio.sleep(0)
        return seconds

    assert run_virtual(main()) == [4]  # of the second step, 3.8 s were no fault of its own


def test_the_wait_for_a_processor_comes_from_the_system() -> None:
    assert processor_wait_s(threading.get_native_id()) >= 0
    assert processor_wait_s(-1) == 0


def wait_to_be_seen(count: int) -> None:
    """Block the thread until the thread beside the loop has seen it so many times: no time limit is at stake here."""
    step = loop_holds()._step  # pyright: ignore[reportPrivateUsage]
    assert step is not None
    ended_s = time.monotonic() + 300
    while (step.places is None or step.places.total() < count) and time.monotonic() < ended_s:
        time.sleep(REPORTED_HOLD_S)  # the line that is named


class Grading(Word):
    """Blocks in the grader of two tasks."""

    def grade(self, reply: rlkit.Reply) -> float:
        if self.task_id in ("task-1", "task-2"):
            wait_to_be_seen(3)
        return super().grade(reply)


def test_the_blocking_line_is_reported_with_its_environment_and_by_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit._util.loop_holds.processor_wait_s", lambda native_id: 0.0)  # however busy the machine is
    run = Simulation(tmp_path / "run", tasks=[Grading(number) for number in range(4)])
    run.settings = {"batch": {"groups": 4, "group_size": 2}, "steps": 1, "rollouts": {"timeout_s": 3000}}

    async def main() -> None:  # virtual time stands still in a step: let it pass as real time does
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualClock)
        began_s, virtual_s = time.monotonic(), loop.time
        loop.time = lambda: virtual_s() + time.monotonic() - began_s  # type: ignore[method-assign]  time passes within a callback, too
        await run.trainer().train()

    run_virtual(main())
    line = next(
        n for n, text in enumerate(Path(HERE).read_text().splitlines(), 1) if "# the line that is named" in text
    )
    place = f"{HERE}:{line} in wait_to_be_seen"
    (note,) = [note for note in run.ears.notes if "blocking" in note]
    assert note.startswith(f"step 1: blocking in words: {place} blocked the event loop once, for at most ")
    assert "asyncio.to_thread" in note
    result: Any = CliRunner().invoke(app, ["doctor", str(run.directory), "--json"], prog_name="rlkit")
    (finding,) = [each for each in json.loads(result.stdout)["findings"] if each["name"] == "blocking"]
    assert (finding["env"], finding["first"]) == ("words", 1)
    assert finding["evidence"].startswith(f"{place} blocked the event loop 4 times, for at most ")


def test_a_hold_without_a_watch_is_excluded_and_not_reported() -> None:
    played = play(Blocking(3), Waiting(), timeout_s=4)
    assert [error for _, error in played] == [None, None]


LIMIT_S = 0.5


class Sleeping(rlkit.Env):
    """Blocks its thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def rollout(self, policy: rlkit.Policy) -> float:
        time.sleep(self.seconds)
        return 1.0


def find_late_places(*seconds: float, first_s: float = 0.0, limit_s: float = LIMIT_S) -> list[Place]:
    """Return the places at which rollouts block for longer than the limit, after other long work."""
    places = list[Place]()

    async def main() -> None:
        with loop_holds().watch(None, limit_s=limit_s, end=places.append):
            time.sleep(first_s)
            with attribute_holds("words"):
                time.sleep(first_s)
            played = [play_env(Sleeping(held_s), ScriptedPolicy([]), timeout_s=300) for held_s in seconds]
            await asyncio.gather(*played)

    asyncio.run(main())
    return places


def test_a_rollout_that_keeps_blocking_is_detected_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_holds_module, "_LOOK_S", 0.02)
    (place,) = find_late_places(4 * LIMIT_S)
    assert (place.file, place.function) == (HERE, "rollout")
    assert "time.sleep(self.seconds)" in Path(HERE).read_text().splitlines()[place.line - 1]


def test_rollouts_that_alternate_may_take_longer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_holds_module, "_LOOK_S", 0.02)
    # A limit that a busy machine does not make one of them reach.
    assert find_late_places(*[0.15] * 15, limit_s=2.0) == []


def test_code_outside_of_a_rollout_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_holds_module, "_LOOK_S", 0.02)
    assert find_late_places(0.0, first_s=2 * LIMIT_S) == []
