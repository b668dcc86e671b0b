"""Environments of verifiers, played by the real package in a virtual environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import rlkit
from rlkit._util.priority_semaphore import Slots
from rlkit.config.loading.objects import load_envs
from rlkit.config.schema import EnvConfig
from rlkit.env import Task
from rlkit.envs.verifiers import verifiers
from rlkit.envs.verifiers.task import VerifiersProcess, VerifiersTask
from rlkit.errors import MissingError, ServiceError, UsageError
from rlkit.policy import Limits
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.testing import ByteChat, ScriptedPolicy, ScriptedSampler
from rlkit.types import Episode, Sampling
from tests.endpoint.test_openai_chat import make_policy
from tests.limits import HANG_S

ROOT = Path(__file__).parents[3]
UNLIMITED = Limits()
PACKAGE = str(Path(__file__).parent / "trouble")

needs_uv = pytest.mark.skipif("UV" not in os.environ and shutil.which("uv") is None, reason="uv is not installed")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, VerifiersTask]]:
    """All tasks of `trouble`, installed once; the environment may read `TROUBLE_TOKEN`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLKIT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        for name in ("TROUBLE", "TROUBLE_API_KEY", "TROUBLE_TOKEN"):
            patch.setenv(name, "a value")
        yield {task.task_id: task for task in verifiers(id="trouble", packages=[PACKAGE], secrets=["TROUBLE_TOKEN"])}


def play(
    *tasks: VerifiersTask, reply: str = "one two", limits: Limits = UNLIMITED, timeout_s: float = HANG_S
) -> list[Episode]:
    """Play each task once, one after the other, as a run does."""

    async def main() -> list[Episode]:
        settings = EnvSettings(1, Sampling(max_tokens=16), timeout_s, 0, limits)
        chat = ByteChat()
        player = Player(LocalRunner(chat), {"trouble": settings}, seed=0, slots=Slots(1))
        sampler = ScriptedSampler(lambda prompt, *, seed: reply, chat=chat)
        groups = [await player.play(Task(draw, "trouble", task), lambda: sampler) for draw, task in enumerate(tasks)]
        return [group.episodes[0] for group in groups]

    return asyncio.run(main())


@needs_uv
@pytest.mark.slow
def test_a_run_has_the_rewards_of_verifiers_own_evaluation(byte_model_dir: Path, tmp_path: Path) -> None:
    small = ["batch.groups=2", "batch.group_size=2", "steps=2", "eval=null", "rollouts.workers=2"]
    command = ["train", "examples/verifiers.yaml", "--name", "first", f"model={byte_model_dir}", *small]
    environ = {**os.environ, "RLKIT_RUNS_DIR": str(tmp_path), "RLKIT_CACHE_DIR": str(tmp_path / "cache")}
    for arguments in (command, ["audit", "first"]):
        run([sys.executable, "-m", "rlkit", *arguments], environ)
    rows = pd.read_parquet(tmp_path / "first" / "episodes").to_dict("records")
    rewards, replies = defaultdict[str, list[float]](list), defaultdict[str, list[str]](list)
    for row in rows:
        rewards[row["task"]].append(row["reward"])
        replies[row["task"]].append(json.loads(row["turns"][0]["messages"])[-1]["content"])
    assert [len(values) for values in rewards.values()] == [2, 2, 2, 2]
    assert len({reward for values in rewards.values() for reward in values}) > 1
    (program,) = (tmp_path / "cache").rglob("bin/vf-eval")
    evaluated = evaluate(program, replies, tmp_path / "evaluation")
    assert evaluated == {task: sorted(values) for task, values in rewards.items()}
    lines = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()]
    mean = sum(map(sum, evaluated.values())) / 8
    assert sum(line["env/letters/reward/mean"] for line in lines) / 2 == pytest.approx(mean)


def run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def evaluate(program: Path, replies: Mapping[str, list[str]], output: Path) -> dict[str, list[float]]:
    """Return the rewards that verifiers' own command gives to these replies, two for each task."""
    remaining = {f"Write {int(task) + 1} letters": iter(texts) for task, texts in replies.items()}

    def author(prompt: str, *, seed: int) -> str:
        return next(next(texts) for question, texts in remaining.items() if question in prompt)

    policy = make_policy(sampler=ScriptedSampler(author, chat=ByteChat()))
    command = [str(program), "letters", "--no-push", "--no-rich", "-r", "2", "-o", str(output)]
    command += ["--select.include.idx", ",".join(replies), "--env.agent.harness.id", "null"]
    command += ["--env.agent.runtime.type", "subprocess", "--client.api-key-var", "THE_API_KEY"]

    async def main() -> None:
        async with policy.endpoint() as endpoint:
            environ = {**os.environ, "THE_API_KEY": endpoint.key}
            await asyncio.to_thread(run, [*command, "--client.base-url", endpoint.url], environ)

    asyncio.run(main())
    rewards = defaultdict[str, list[float]](list)
    (path,) = output.rglob("traces.jsonl")
    for line in path.read_text().splitlines():
        (trace,) = json.loads(line)["traces"]
        scores = [reward["score"] * reward["weight"] for reward in trace["rewards"].values()]
        rewards[str(trace["task"]["data"]["idx"])].append(sum(scores))
    return {task: sorted(values) for task, values in rewards.items()}


@needs_uv
@pytest.mark.slow
def test_a_conversation_is_one_segment_of_exact_tokens(tasks: Mapping[str, VerifiersTask]) -> None:
    (episode,) = play(tasks["fine"])
    assert (episode.status, episode.reward, episode.metrics["replies"]) == ("completed", 2.0, 3.0)
    assert [turn.parent for turn in episode.turns] == [None, 0, 1]
    assert episode.info["ended"] == "user_closed"


@needs_uv
@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "turns", "ended"),
    [(Limits(max_turns=2), 2, "max_turns"), (Limits(context_tokens=30), 1, "max_total_tokens")],
)
def test_a_limit_truncates_and_verifiers_scores_what_there_is(
    tasks: Mapping[str, VerifiersTask], limits: Limits, turns: int, ended: str
) -> None:
    (episode,) = play(tasks["fine"], limits=limits)
    assert (episode.status, episode.reward, len(episode.turns)) == ("truncated", 2.0, turns)
    assert episode.info["ended"] == ended


@needs_uv
@pytest.mark.slow
def test_a_reply_that_is_cut_truncates(tasks: Mapping[str, VerifiersTask]) -> None:
    (episode,) = play(tasks["fine"], reply="a reply of more than 16 tokens")
    assert (episode.status, len(episode.turns)) == ("truncated", 3)


@needs_uv
@pytest.mark.slow
def test_an_episode_that_verifiers_did_not_score_fails_with_its_error(tasks: Mapping[str, VerifiersTask]) -> None:
    names = ["raises", "dies", "fine", "looks", "is infinite", "scores slowly", "plays twice"]
    episodes = dict(zip(names, play(*[tasks[name] for name in names]), strict=True))
    assert episodes.pop("fine").reward == 2.0  # the process was started again
    assert {episode.status for episode in episodes.values()} == {"failed"}
    errors = {name: episode.error or "" for name, episode in episodes.items()}
    assert errors["raises"] == "TaskError: task finalize: ValueError: the task is broken"
    assert errors["dies"].startswith("ProcessError: verifiers sent no report, see ")
    assert errors["looks"] == "TaskError: task finalize: ValueError: it sees ['TROUBLE', 'TROUBLE_TOKEN']"
    assert "inf" in errors["is infinite"]
    assert errors["scores slowly"] == "ScoringError: the task was not scored: scoring_timeout"
    assert errors["plays twice"] == "SeatError: the policy played 2 conversations, and rlkit trains one"


async def wait_for_line(process: VerifiersProcess, line: str) -> None:
    while line not in (process._log.read_text() if process._log.exists() else ""):
        await asyncio.sleep(0.01)


@needs_uv
@pytest.mark.slow
def test_a_rollout_that_is_cancelled_leaves_the_process_to_the_next(tasks: Mapping[str, VerifiersTask]) -> None:
    async def main() -> rlkit.Outcome:
        hanging = asyncio.create_task(tasks["hangs"].rollout(ScriptedPolicy(["one"] * 3)))
        process = await tasks["hangs"].process.get()
        await wait_for_line(process, "the task hangs")
        hanging.cancel()
        await wait_for_line(process, "the task is cancelled")
        started = process._process
        outcome = await tasks["fine"].rollout(ScriptedPolicy(["one two"] * 3))
        assert process._process is started
        return outcome

    assert asyncio.run(main()).reward == 2.0


@needs_uv
@pytest.mark.slow
def test_a_failure_of_the_service_is_not_one_of_the_environment(tasks: Mapping[str, VerifiersTask]) -> None:
    class Broken:
        version = 0

        async def sample(self, *_: object, **__: object) -> Sequence[object]:
            raise ServiceError("the service is gone")

    with pytest.raises(ServiceError, match="the service is gone"):
        asyncio.run(tasks["fine"].rollout(make_policy(sampler=Broken())))


@needs_uv
@pytest.mark.slow
def test_mistakes_are_named(tasks: Mapping[str, VerifiersTask]) -> None:
    with pytest.raises(UsageError, match=r"^verifiers: .*id, config or taskset: .*nowhere"):
        verifiers(id="nowhere", packages=[PACKAGE])
    with pytest.raises(UsageError, match=r"^verifiers: .*id, config or taskset: .*agnt"):
        verifiers(id="trouble", packages=[PACKAGE], config={"agnt": {}})
    with pytest.raises(UsageError, match=r"^verifiers: .*id, config or taskset: .*splt"):
        verifiers(id="trouble", packages=[PACKAGE], taskset={"splt": "test"})
    with pytest.raises(UsageError, match=r"^verifiers: .*select: .*shufle"):
        verifiers(id="trouble", packages=[PACKAGE], select={"shufle": True})


@needs_uv
@pytest.mark.slow
def test_a_run_is_not_resumed_with_other_tasks_or_versions(tasks: Mapping[str, VerifiersTask]) -> None:
    states = list[Any]()
    verifiers(id="trouble", packages=[PACKAGE], pin=lambda now: states.append(now) or now)
    (state,) = states
    assert "verifiers==0.4.0" in state["versions"]
    assert len(state["versions"]) > 10
    assert not [line for line in state["versions"] if "trouble" in line]
    for changed in ({**state, "tasks": "other"}, {**state, "versions": state["versions"][1:]}):
        with pytest.raises(UsageError, match=r"the tasks or versions are not those of tasks\.json"):
            verifiers(id="trouble", packages=[PACKAGE], pin=lambda now, changed=changed: changed)


@pytest.mark.parametrize("package", ["my-env", "my-env==1.*", "my-env>=1"])
def test_a_package_without_a_version_is_a_mistake(package: str) -> None:
    with pytest.raises(UsageError, match=f"packages: {re.escape(repr(package))} is neither a folder nor pinned"):
        verifiers(id="my-env", packages=[package])


def test_a_secret_that_is_not_set_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TROUBLE_TOKEN", raising=False)
    spec = EnvConfig(env="verifiers", args={"id": "trouble", "packages": [PACKAGE], "secrets": ["TROUBLE_TOKEN"]})
    with pytest.raises(MissingError, match=r"^envs\.trouble: secrets: TROUBLE_TOKEN is not set"):
        load_envs("trouble", spec, field="envs.trouble", seed=0)


def test_missing_uv_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("UV", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path))
    with pytest.raises(MissingError, match="pip install uv"):
        verifiers(id="trouble", packages=[PACKAGE])
