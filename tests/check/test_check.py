from __future__ import annotations

import asyncio
import datetime
import functools
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import time as bound_time
from typing import Any

import numpy as np
import pytest

import rlkit
from rlkit.check import Finding, Report, check
from rlkit.check.conditions import force_chance
from rlkit.env import Env, SingleTurnEnv, Step, StepEnv, ToolEnv
from rlkit.errors import LimitReached, UsageError
from rlkit.policy import Policy
from rlkit.types import Group, Json, Message, Outcome, Reply, Tool, ToolCall
from tests.limits import wait_until
from tests.marks import split_slow


def report_of(env: object, *, timeout_s: float = 120.0, tasks: int = 1) -> Report:
    return asyncio.run(check(env, timeout_s=timeout_s, tasks=tasks))  # type: ignore[arg-type]


def failed(report: Report) -> dict[str, Finding]:
    return {finding.check: finding for finding in report.findings if finding.status == "failed"}


def status(report: Report, check: str) -> str:
    (result,) = [finding.status for finding in report.findings if finding.check == check]
    return result


class Sum(SingleTurnEnv):
    def __init__(self, a: int = 1, b: int = 2) -> None:
        self.a, self.b = a, b
        self.gold = str(a + b)
        self.task_id = f"{a}+{b}"

    def prompt(self) -> str | Sequence[Message]:
        return [{"role": "user", "content": f"What is {self.a} + {self.b}?"}]

    def grade(self, reply: Reply) -> Outcome | float:
        return self.right(reply)

    def right(self, reply: Reply) -> float:
        return float(reply.text.strip() == self.gold)


# --- healthy ones


class Completion(Sum):
    """Sampled as plain text, with what an outcome may hold."""

    def prompt(self) -> str | Sequence[Message]:
        return f"{self.a} + {self.b} ="

    def grade(self, reply: Reply) -> Outcome | float:
        return Outcome(np.float32(self.right(reply)), {"correct": self.right(reply)}, {"text": reply.text})


class NumpyTruth(Sum):
    """Returns a truth value of numpy, which a run takes for a number."""

    def grade(self, reply: Reply) -> Outcome | float:
        return np.bool_(self.right(reply))  # type: ignore[return-value]


class Cached(Sum):
    """Fills in what it computes from the task, once."""

    _table: list[int] | None = None

    @functools.cached_property
    def answer(self) -> str:
        return str(self.a + self.b)

    def grade(self, reply: Reply) -> Outcome | float:
        if self._table is None:
            self._table = [1, 2, 3]
        return float(reply.text.strip() == self.answer)


class Guess(StepEnv[list[str]]):
    max_turns = 4
    gold = "7"

    def reset(self) -> tuple[list[str], Sequence[Message]]:
        return [], [{"role": "user", "content": "Guess a number."}]

    async def step(self, state: list[str], reply: Reply) -> Step:
        state.append(reply.text)
        won = reply.text.strip() == self.gold
        return Step([{"role": "user", "content": f"No, guess {len(state)} was wrong."}], float(won), done=won)


class Adder(ToolEnv[dict[str, int]]):
    max_turns = 4
    gold = "7"

    def tools(self) -> Sequence[Tool]:
        number: Mapping[str, Json] = {"type": "integer"}
        schema: Mapping[str, Json] = {"type": "object", "properties": {"a": number, "b": number}}
        return [{"name": "add", "description": "adds two numbers", "parameters": schema}]

    def reset(self) -> tuple[dict[str, int], Sequence[Message]]:
        return {"calls": 0}, [{"role": "user", "content": "What is 3 + 4?"}]

    async def call(self, state: dict[str, int], call: ToolCall) -> str:
        state["calls"] += 1
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()
        try:
            return str(int(call["arguments"]["a"]) + int(call["arguments"]["b"]))  # type: ignore[arg-type]
        except (KeyError, TypeError) as error:
            raise ValueError(f"wrong arguments: {error}") from error

    async def grade(self, state: dict[str, int], reply: Reply | None) -> Outcome | float:
        return float(reply is not None and reply.text == self.gold)


class Plain(Env):
    """Owns its loop; asks for two drafts at once, then for a choice, off the event loop in between."""

    async def rollout(self, policy: Policy) -> Outcome | float:
        opening: list[Message] = [{"role": "user", "content": "Say seven."}]
        try:
            drafts = await asyncio.gather(policy.chat(opening), policy.chat(opening, max_tokens=5))
            best = await asyncio.to_thread(min, drafts, key=lambda draft: len(draft.text))
            final = await policy.chat([*opening, best.message, {"role": "user", "content": "Sure?"}])
        except LimitReached:
            return 0.0
        return float(final.text == "seven")


@pytest.mark.parametrize(
    "env",
    split_slow(
        [Sum(), Completion(), NumpyTruth(), Cached(), Guess(), Adder(), Plain(), [Sum(1, n) for n in range(9)]],
        lambda env: isinstance(env, Sum | Guess | list),
    ),
    ids=lambda value: type(value).__name__,
)
def test_healthy_environment_passes(env: object) -> None:
    report = report_of(env)
    assert report.ok, failed(report)
    assert status(report, "determinism") == "passed"
    assert status(report, "clean-up") == "passed"


def test_inapplicable_check_is_skipped_with_its_reason() -> None:
    report = report_of(Plain())
    assert status(report, "gold answer") == "skipped"
    assert status(report_of(Sum()), "token prefix") == "skipped"
    assert all(finding.detail for finding in report.findings)


def test_turns_and_segments_are_counted() -> None:
    details = {finding.check: finding.detail for finding in report_of(Guess()).findings}
    assert details["token prefix"] == "up to 4 turns, each of which extends the one before"
    details = {finding.check: finding.detail for finding in report_of(Plain()).findings}
    assert details["token prefix"] == "up to 3 turns in 2 segments"


# --- the reward depends on more than the reply


class WallTime(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return self.right(reply) * (time.time() % 1)


class EvenSeconds(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return self.right(reply) if int(bound_time()) % 2 else 0.5


class Afternoon(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return self.right(reply) if datetime.datetime.now().hour >= 12 else -1.0


class Weekend(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return 0.9 if datetime.date.today().weekday() >= 5 else self.right(reply)


class Impatient(Sum):
    async def rollout(self, policy: Policy) -> Outcome | float:
        started = time.perf_counter()
        reply = await policy.chat([{"role": "user", "content": "Quick!"}])
        return self.right(reply) - 0.01 * (time.perf_counter() - started)


class Lucky(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return 0.5 if random.random() < 0.001 else self.right(reply)


class NumpyLuck(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return 0.5 if np.random.random() > 0.999 else self.right(reply)


class Unseeded(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return self.right(reply) * uuid.uuid4().int % 7 / 7


PLAYED = itertools.count()


class Counted(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return self.right(reply) / (1 + next(PLAYED))


CROWD = [0]


class Crowded(Sum):
    async def rollout(self, policy: Policy) -> Outcome | float:
        CROWD[0] += 1
        try:
            await policy.chat([{"role": "user", "content": "Alone?"}])
            return 1.0 / (1 + CROWD[0])
        finally:
            CROWD[0] -= 1


@pytest.mark.parametrize(
    "env",
    [
        WallTime(),
        EvenSeconds(),
        Afternoon(),
        Weekend(),
        Impatient(),
        Lucky(),
        NumpyLuck(),
        Unseeded(),
        Counted(),
        Crowded(),
    ],
    ids=lambda env: type(env).__name__,
)
def test_a_reward_that_depends_on_more_than_the_reply_is_found(env: object) -> None:
    assert "determinism" in failed(report_of(env))


def test_reward_that_depends_on_wall_time_is_named_as_such() -> None:
    assert "clock" in failed(report_of(Afternoon()))["determinism"].detail


class Dice(Lucky):
    stochastic = True


def test_randomness_of_the_task_is_not_a_fault() -> None:
    assert status(report_of(Dice()), "determinism") == "skipped"


def test_forced_chance_lies_beyond_any_threshold() -> None:
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        force_chance(high=False)
        assert max(random.random(), np.random.random()) < 1e-4
        force_chance(high=True)
        assert min(random.random(), np.random.random()) > 1 - 1e-4
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)


# --- it does not end


class Sleeper(Sum):
    async def rollout(self, policy: Policy) -> Outcome | float:
        await asyncio.Event().wait()
        return 0.0


class Blocker(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        time.sleep(3600)
        return 0.0


class Backtracking(Sum):
    """Holds the interpreter lock, so that no thread of its process can look on."""

    def grade(self, reply: Reply) -> Outcome | float:
        return float(re.match(r"(x|xx)+$", reply.text[:60] + "!") is not None)


class Stubborn(Sum):
    async def rollout(self, policy: Policy) -> Outcome | float:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue


class Quitter(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        os._exit(3)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Sleeper(), "not done after 0.3 s"),
        (Blocker(), "blocks the event loop"),
        (Backtracking(), "blocks the event loop"),
        (Stubborn(), "cancellation does not end it"),
        (Quitter(), "the process ended on its own"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_environment_that_does_not_end_is_found(env: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "event loop" not in message:  # on a busy machine the one that watches may be slow, too
        monkeypatch.setattr("rlkit.check.forked_process.MARGIN_S", 60.0)
    report = report_of(env, timeout_s=0.3)
    assert message in failed(report)["time limit"].detail
    assert status(report, "determinism") == "skipped"


class Suspender(Sum):
    """Suspends both processes in its first rollout, as a laptop that sleeps does."""

    def __init__(self, marker: Path) -> None:
        super().__init__()
        self.marker = marker

    def grade(self, reply: Reply) -> Outcome | float:
        if not self.marker.exists():
            self.marker.touch()
            processes = f"{os.getppid()} {os.getpid()}"
            # It begins once the announcement of the rollout is read.
            command = f"sleep 0.5; kill -STOP {processes}; sleep 7; kill -CONT {processes}"
            subprocess.Popen(["sh", "-c", command], start_new_session=True)
            time.sleep(8.0)
        return self.right(reply)


@pytest.mark.slow
def test_the_time_of_a_suspended_machine_does_not_count(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.check.test_check import Suspender, report_of, status\n"
        "print(status(report_of(Suspender(Path(sys.argv[1])), timeout_s=3.0), 'time limit'))"
    )
    # In a process of its own, so that a shell does not see pytest stop.
    command, root = [sys.executable, "-c", code, str(tmp_path / "marker")], Path(__file__).parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert (tmp_path / "marker").exists()
    assert result.stdout == "passed\n"


# --- it changes


class Historian(Sum):
    def __init__(self) -> None:
        super().__init__()
        self.replies: list[list[str]] = [[]]

    def grade(self, reply: Reply) -> Outcome | float:
        self.replies[0].append(reply.text)
        return self.right(reply)


class Flagged(Sum):
    done = False

    def grade(self, reply: Reply) -> Outcome | float:
        self.done = True
        return self.right(reply)


class Shared(Sum):
    best: dict[str, float] = {}  # noqa: RUF012  the fault under test

    def grade(self, reply: Reply) -> Outcome | float:
        self.best[reply.text] = self.right(reply)
        return self.right(reply)


class Shuffler(Sum):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)

    def grade(self, reply: Reply) -> Outcome | float:
        self.chance.random()
        return self.right(reply)


class Memo(Sum):
    _memo: dict[str, float] | None = None

    def grade(self, reply: Reply) -> Outcome | float:
        self._memo = self._memo or {}
        self._memo[reply.text] = self.right(reply)
        return self.right(reply)


@pytest.mark.parametrize(
    ("env", "where"),
    [
        (Historian(), "replies[0]"),
        (Flagged(), "done"),
        (Shared(), "Shared.best"),
        (Shuffler(), "chance"),
        (Memo(), "_memo"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_environment_that_changes_between_rollouts_is_found(env: object, where: str) -> None:
    assert where in failed(report_of(env))["environment state"].detail


# --- its grader is wrong


class Generous(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return float(self.gold.startswith(reply.text.strip()))


class Literal(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return float(float(reply.text) == self.a + self.b)


class NotANumber(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return float("nan") if "nan" in reply.text else self.right(reply)


class UnmeasuredMetric(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return Outcome(self.right(reply), {"score": float("nan")})


class Nothing(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return None if "boxed" in reply.text else self.right(reply)  # type: ignore[return-value]


class Exiting(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        if "<answer>" in reply.text:
            sys.exit(1)
        return self.right(reply)


class SelfCancelled(Sum):
    async def rollout(self, policy: Policy) -> Outcome | float:
        await super().rollout(policy)
        raise asyncio.CancelledError


class Unwritable(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return Outcome(self.right(reply), info={"reply": reply})  # type: ignore[dict-item]


class Contradictory(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return self.right(reply) / 2


class Overpaid(Sum):
    max_reward = 0.5


def test_a_grader_that_accepts_the_empty_answer_is_found() -> None:
    assert "''" in failed(report_of(Generous()))["empty answer"].detail


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Literal(), "raised ValueError"),
        (NotANumber(), "rewards must be finite"),
        pytest.param(UnmeasuredMetric(), "the metric score = float nan", marks=pytest.mark.slow),
        pytest.param(Nothing(), "NoneType", marks=pytest.mark.slow),
        (Exiting(), "raised SystemExit"),
        pytest.param(SelfCancelled(), "raised CancelledError", marks=pytest.mark.slow),
        (Unwritable(), "cannot be written as JSON"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_environment_that_fails_on_odd_text_is_found(env: object, message: str) -> None:
    assert message in failed(report_of(env))["odd replies"].detail


class Crashing(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        return float(reply.text.split("|")[3] == self.gold)


def test_a_grader_that_always_raises_is_named_with_its_line() -> None:
    report = report_of(Crashing())
    line = Crashing.grade.__code__.co_firstlineno + 1
    error = f"raised IndexError: list index out of range, at tests/check/test_check.py:{line}"
    findings = failed(report)
    assert findings.keys() == {"gold answer", "odd replies"}
    assert all(error in finding.detail for finding in findings.values())
    assert findings["gold answer"].fix == findings["odd replies"].fix
    assert "correct the code that raised" in findings["odd replies"].fix
    untried = {
        finding.check
        for finding in report.findings
        if f"could not be tried: each rollout failed; the first {error}" in finding.detail
    }
    assert untried == {"empty answer", "clean-up", "environment state", "determinism"}
    assert all(status(report, check) == "skipped" for check in untried)


class Caller(Adder):
    """Rewards a right answer only after a call of the tool."""

    gold: Any = [  # noqa: RUF012  as users write it
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "name": "add", "arguments": {"a": 3, "b": 4}}],
        },
        {"role": "tool", "content": "7", "tool_call_id": "1"},
        {"role": "assistant", "content": "7"},
    ]

    async def grade(self, state: dict[str, int], reply: Reply | None) -> Outcome | float:
        return float(state["calls"] == 1 and reply is not None and reply.text == "7")


def test_a_gold_answer_may_be_a_conversation_with_tool_calls() -> None:
    assert status(report_of(Caller()), "gold answer") == "passed"
    wrong = Caller()
    wrong.gold = [{"role": "assistant", "content": "7"}]
    assert "reward 0, not 1" in failed(report_of(wrong))["gold answer"].detail


@pytest.mark.parametrize(
    ("gold", "line"),
    [
        (["7"], "gold.0: "),
        pytest.param(
            [{"role": "assistant"}], "gold.0.content: Field required; write a message as", marks=pytest.mark.slow
        ),
        pytest.param([{"role": "assistant", "content": 7}], "gold.0.content: ", marks=pytest.mark.slow),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "gold.0.tool_calls.0.name: "),
        (
            [{"role": "user", "content": "7"}],
            "gold: expected a text or a list of messages, one of them the assistant's",
        ),
        ({"role": "assistant", "content": "7"}, "gold: expected a text or a list"),
        pytest.param(7, "gold: expected a text or a list of messages", marks=pytest.mark.slow),
    ],
)
def test_a_gold_answer_of_another_form_is_a_finding(gold: object, line: str) -> None:
    env = Caller()
    env.gold = gold
    assert line in failed(report_of(env))["gold answer"].detail


def test_a_gold_answer_without_the_full_reward_is_found() -> None:
    assert "0.5, not 1" in failed(report_of(Contradictory()))["gold answer"].detail


class Doubled(Contradictory):
    def grade(self, reply: Reply) -> Outcome | float:
        return 2 * float(reply.text.strip() == str(self.a + self.b))


class Boundless(Plain):
    max_reward = math.inf
    gold = "42"  # no reward is the full one

    async def rollout(self, policy: Policy) -> Outcome | float:
        return 2.0 * ("42" in (await policy.sample("Name a number.")).text)


def test_reward_above_the_maximum_is_found() -> None:
    assert set(failed(report_of(Overpaid()))) == {"reward range"}
    finding = failed(report_of(Doubled()))["reward range"]
    assert finding.detail == "a reward of 2 is above max_reward, 1"
    assert "env.max_reward (1 by default), or set it" in finding.fix
    assert report_of(Boundless()).ok


class Stingy(Plain):
    async def rollout(self, policy: Policy) -> Outcome | float:
        await policy.sample("Name a number.")
        return 0.0


def test_a_grader_that_never_rewards_does_not_pass_the_range() -> None:
    findings = {finding.check: finding for finding in report_of(Stingy()).findings}
    assert findings["reward range"].status == "skipped"
    assert findings["reward range"].detail.startswith("each reward was 0: give the environment a `gold` reply")


# --- it misuses the policy


class Silent(Sum):
    def prompt(self) -> str | Sequence[Message]:
        return " "


class Deaf(Sum):
    async def rollout(self, policy: Policy) -> Outcome | float:
        return 0.0


class Unlimited(Env):
    async def rollout(self, policy: Policy) -> Outcome | float:
        reply = await policy.sample("Once")
        again = await policy.sample(f"{reply.text} twice")
        return float(again.text == "seven")


class Editor(Env):
    """Keeps the text of a reply, and so loses its thinking."""

    async def rollout(self, policy: Policy) -> Outcome | float:
        messages: list[Message] = [{"role": "user", "content": "Go on."}]
        try:
            for _ in range(3):
                reply = await policy.chat(messages)
                messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "Go on."}]
        except LimitReached:
            pass
        return 0.0


class Mutator(Env):
    """Edits the reply that it appends."""

    async def rollout(self, policy: Policy) -> Outcome | float:
        messages: list[Message] = [{"role": "user", "content": "Go on."}]
        try:
            for _ in range(3):
                reply = await policy.chat(messages)
                reply.message["content"] = "I message nothing."
                messages += [reply.message, {"role": "user", "content": "Go on."}]
        except LimitReached:
            pass
        return 0.0


@pytest.mark.parametrize(
    ("env", "name"),
    [
        (Silent(), "prompt"),
        (Deaf(), "prompt"),
        (Unlimited(), "turn limit"),
        (Editor(), "token prefix"),
        (Mutator(), "token prefix"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Env) else value,
)
def test_misuse_of_the_policy_is_found(env: object, name: str) -> None:
    findings = failed(report_of(env))
    assert name in findings
    assert findings[name].fix


# --- it leaves things behind


class Forgetful(Sum):
    """Starts a task and lets it be."""

    async def rollout(self, policy: Policy) -> Outcome | float:
        KEPT.append(asyncio.create_task(asyncio.sleep(60)))
        return await super().rollout(policy)


class Threaded(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return self.right(reply)


class Opener(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        KEPT.append(Path(os.devnull).open())  # noqa: SIM115  the fault under test
        return self.right(reply)


class Parent(Sum):
    def grade(self, reply: Reply) -> Outcome | float:
        KEPT.append(subprocess.Popen(["sleep", "60"]))
        return self.right(reply)


class LeakyWhenCancelled(Sum):
    async def rollout(self, policy: Policy) -> Outcome | float:
        file = Path(os.devnull).open()  # noqa: SIM115  the fault under test
        KEPT.append(file)
        outcome = await super().rollout(policy)
        file.close()
        return outcome


class Swallower(Sum):
    async def rollout(self, policy: Policy) -> Outcome | float:
        try:
            return await super().rollout(policy)
        except asyncio.CancelledError:
            return 0.0


KEPT: list[object] = []


@pytest.mark.parametrize(
    ("env", "name", "message"),
    [
        (Forgetful(), "clean-up", "a pending task"),
        pytest.param(Threaded(), "clean-up", "a thread", marks=pytest.mark.slow),
        pytest.param(Opener(), "clean-up", "an open file", marks=pytest.mark.slow),
        (Parent(), "clean-up", "a child process"),
        pytest.param(LeakyWhenCancelled(), "cancellation", "an open file", marks=pytest.mark.slow),
        (Swallower(), "cancellation", "CancelledError"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Env) else value,
)
def test_leftovers_of_a_rollout_are_found(env: object, name: str, message: str) -> None:
    assert message in failed(report_of(env))[name].detail


def test_unpicklable_environment_is_found_and_still_played() -> None:
    env = Sum()
    env.lock = threading.Lock()  # type: ignore[attr-defined]
    assert set(failed(report_of(env))) == {"pickling"}


# --- sources of tasks


class Counter(rlkit.TaskSource):
    def __init__(self, *, honest: bool = True, last: int = 9) -> None:
        self.at, self.honest, self.last = 0, honest, last

    def next(self) -> Env | None:
        self.at += 1
        return Sum(self.at, 1) if self.at <= self.last else None

    def observe(self, group: Group) -> None: ...

    def state_dict(self) -> Mapping[str, Json]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        if self.honest:
            self.at = int(json.dumps(state["at"]))


def test_source_repeats_its_tasks_and_is_not_changed() -> None:
    source = Counter()
    report = report_of(source, tasks=3)
    assert report.ok, failed(report)
    assert status(report, "task source") == "passed"
    assert source.at == 0


def test_a_source_that_forgets_its_state_is_found() -> None:
    assert set(failed(report_of(Counter(honest=False)))) == {"task source"}


@pytest.mark.parametrize("nothing", [[], Counter(last=0), Sum, 3], ids=["empty list", "source", "class", "number"])
def test_nothing_to_check_is_a_usage_error(nothing: object) -> None:
    with pytest.raises(UsageError):
        report_of(nothing)


# --- the checker itself


def test_process_of_the_caller_is_not_changed() -> None:
    random.seed(5)
    chance, clock, moment, threads = random.getstate(), time.time, datetime.datetime, threading.active_count()
    report_of(Historian())
    assert (random.getstate(), time.time, datetime.datetime) == (chance, clock, moment)
    assert threading.active_count() == threads


def test_the_same_seed_gives_the_same_findings() -> None:
    first, second = report_of(Literal()), report_of(Literal())
    assert first.findings[:-1] == second.findings[:-1]


def child_processes() -> set[str]:
    return {pid for children in Path("/proc/self/task").glob("*/children") for pid in children.read_text().split()}


def test_cancelling_the_check_ends_its_process() -> None:
    processes_before = child_processes()  # other tests of this process may have left a server running

    async def cancel_check() -> None:
        task = asyncio.create_task(check(Blocker(), timeout_s=3600))
        await asyncio.to_thread(wait_until, lambda: child_processes() - processes_before)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(cancel_check())
    assert child_processes() <= processes_before
