"""The environment `beaker`, against a fake of Beaker's servers which runs a job's command as a process of this machine.

The fake stands at the network: beaker-py and the program in the job are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rlkit._util import threads
from rlkit.envs.harbor import beaker_agent
from rlkit.envs.harbor.settings import TrialSettings, make_environment
from rlkit.envs.harbor.task import HarborTask
from rlkit.errors import EnvironmentFault, ServiceError, UsageError
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.sandbox import CommandTimeout
from tests.launch.fake_beaker import FakeBeaker, fake_beaker
from tests.limits import HANG_S, wait_until

from .conftest import AgentTime, write_task
from .playing import DO, DONE, Faulty, Late, make_reply, recording, write_simple
from .test_task import played

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'preemptible' field is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

IMAGE = '[environment]\ndocker_image = "debian:12"\nbuild_timeout_sec = 600\n'


@pytest.fixture
def fake(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBeaker]:
    """Jobs are processes of this machine, and in sandboxes where a test has a cache for these."""
    pytest.importorskip("beaker")
    import grpc  # pyright: ignore[reportMissingTypeStubs]

    monkeypatch.setattr(grpc, "secure_channel", lambda address, credentials, options: grpc.insecure_channel(address))
    monkeypatch.setattr("rlkit.envs.harbor.beaker._POLL_S", 0.02)
    monkeypatch.delenv("BEAKER_TOKEN", raising=False)
    with fake_beaker(FakeBeaker(execute=True, contain="cache" in request.fixturenames)) as beaker:
        monkeypatch.setenv("BEAKER_CONFIG", str(beaker.config(tmp_path / "beaker.yml")))
        yield beaker
        beaker.kill()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    task_path = write_task(tmp_path / "task")
    settings = (task_path / "task.toml").read_text().replace("[environment]\nbuild_timeout_sec = 600\n", IMAGE)
    (task_path / "task.toml").write_text(settings)
    return task_path


def make_job(task: Path, **settings: object):
    from harbor.models.task.task import Task
    from harbor.models.trial.paths import TrialPaths

    from rlkit.envs.harbor.beaker import BeakerSandbox

    paths = TrialPaths(task.parent / "trial")
    paths.mkdir()
    harbor_task = Task(task)
    return BeakerSandbox(
        environment_dir=harbor_task.paths.environment_dir,
        environment_name="tiny_task",
        session_id="tiny_task__1__env",
        trial_paths=paths,
        task_env_config=harbor_task.config.environment,
        logger=logging.getLogger("test"),
        **settings,
    )


def run_in_job(task: Path, function: Callable[..., Awaitable[None]], **settings: object) -> None:
    async def main() -> None:
        job = make_job(task, **settings)
        await job.start(force_build=False)
        try:
            await function(job)
        finally:
            await job.stop(delete=True)

    asyncio.run(main())


def test_commands_run_in_the_job_and_files_go_in_and_out(fake: FakeBeaker, task: Path, tmp_path: Path) -> None:
    place = tmp_path / "in the job"

    async def main(job) -> None:
        done = await job.exec('echo "$A"; echo problem >&2; pwd; exit 3', env={"A": "b $c"}, cwd=str(place))
        assert (done.stdout, done.stderr, done.return_code) == (f"b $c\n{place}\n", "problem\n", 3)
        (tmp_path / "folder" / "deep").mkdir(parents=True)
        (tmp_path / "folder" / "deep" / "file").write_text("content")
        await job.upload_dir(tmp_path / "folder", str(place / "up"))
        await job.upload_file(tmp_path / "folder" / "deep" / "file", str(place / "other" / "name"))
        done = await job.exec("cat up/deep/file other/name", cwd=str(place))
        assert done.stdout == "contentcontent"
        await job.download_dir(str(place / "up"), tmp_path / "down")
        await job.download_file(str(place / "other" / "name"), tmp_path / "down.txt")
        assert (tmp_path / "down" / "deep" / "file").read_text() == (tmp_path / "down.txt").read_text() == "content"
        both = await asyncio.gather(job.exec("sleep 0.5; echo 1"), job.exec("sleep 0.5; echo 2"))
        assert [result.stdout for result in both] == ["1\n", "2\n"]

    run_in_job(task, main, workspace="me/mine", clusters=["ai2/jupiter"], budget="ai2/oe-base")
    assert fake.over
    assert fake.cancelled == 1
    (sent,) = fake.submitted
    (described,) = sent["spec"]["tasks"]
    assert described["image"] == {"docker": "debian:12"}
    assert described["constraints"] == {"cluster": ["ai2/jupiter"]}
    assert (described["context"]["preemptible"], described["hostNetworking"]) == (False, True)
    assert described["timeout"] == 4 * 3600 * 10**9
    assert sent["spec"]["budget"] == "ai2/oe-base"


def test_a_command_that_times_out_is_killed_with_its_children(fake: FakeBeaker, task: Path, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def main(job) -> None:
        with pytest.raises(CommandTimeout):
            await job.exec(f"sleep 3600 & echo $$ $! > {pids}; wait", timeout_sec=2)
        assert (await job.exec("echo still here")).stdout == "still here\n"
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()))

    run_in_job(task, main)


def test_a_command_returns_although_a_background_process_holds_its_output(fake: FakeBeaker, task: Path) -> None:
    async def main(job) -> None:
        done = await job.exec("sleep 3600 & echo hello")
        assert (done.stdout, done.return_code) == ("hello\n", 0)

    run_in_job(task, main)


def test_endless_output_of_a_command_is_cut_off(fake: FakeBeaker, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(beaker_agent.__file__).read_text()
    (task / "agent.py").write_text(text.replace("OUTPUT_BYTES = 16 << 20", "OUTPUT_BYTES = 1000"))
    monkeypatch.setattr("rlkit.envs.harbor.beaker_agent.__file__", str(task / "agent.py"))

    async def main(job) -> None:
        done = await job.exec("head -c 10000000 /dev/zero | tr '\\0' a; echo problem >&2")
        assert (done.stdout, done.stderr, done.return_code) == ("a" * 1000, "problem\n", 0)

    run_in_job(task, main)


def test_a_job_rejects_requests_without_its_token(fake: FakeBeaker, task: Path) -> None:
    async def main(job) -> None:
        address = str(job._client.base_url)
        for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"}):
            answer = httpx.post(f"{address}/run", content=json.dumps({"command": "id"}), headers=headers)
            assert answer.status_code == 403

    run_in_job(task, main)
    assert "RLKIT_AGENT_TOKEN" not in "".join(fake.jobs[0])


def test_a_cancelled_start_leaves_no_job(fake: FakeBeaker, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.envs.harbor.beaker_agent.READY", "a word that it never says")

    async def main() -> None:
        starting = asyncio.create_task(make_job(task).start(force_build=False))
        while not fake.submitted:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    assert fake.over
    assert fake.cancelled == 1


def test_a_job_that_dies_is_an_environment_fault(fake: FakeBeaker, task: Path) -> None:
    async def main(job) -> None:
        assert fake.process is not None
        fake.process.kill()
        fake.process.wait()
        with pytest.raises(EnvironmentFault, match="the job does not respond"):
            await job.exec("true")

    run_in_job(task, main)

    async def without_python() -> None:
        with pytest.raises(EnvironmentFault, match="does its image have no-such-python"):
            await make_job(task, python="no-such-python").start(force_build=False)

    asyncio.run(without_python())
    assert fake.over


def test_a_job_ends_after_its_owner_dies(fake: FakeBeaker, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.envs.harbor.beaker._IDLE_S", 1)
    monkeypatch.setattr("rlkit.envs.harbor.beaker._ALIVE_S", 60)

    async def main(job) -> None:
        assert fake.process is not None
        while fake.process.poll() is None:
            await asyncio.sleep(0.05)

    run_in_job(task, main)
    assert fake.process is not None
    assert fake.process.returncode == 0


def test_a_task_without_an_image_is_rejected_before_it_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Beaker cannot build images: set docker_image in the task"):
        make_job(write_task(tmp_path / "task"))


def test_the_environment_has_a_name() -> None:
    assert make_environment("beaker", {"workspace": "a/b"}).import_path == "rlkit.envs.harbor.beaker:BeakerSandbox"


WHOLE = f"{IMAGE}workdir = '/app'\n"


@pytest.fixture
def greeting(tmp_path: Path) -> HarborTask:
    """A whole task, which is played as a job."""
    folder = write_simple(tmp_path / "greet")
    settings = (folder / "task.toml").read_text().replace("[environment]\nbuild_timeout_sec = 600\n", WHOLE)
    (folder / "task.toml").write_text(settings)
    place = make_environment("beaker", {"workspace": "me/mine", "python": "/usr/bin/python3"})
    return HarborTask("greet", folder, TrialSettings(environment=place, agent_timeout_s=HANG_S))


def test_a_whole_trial_is_a_job_that_is_gone_with_it(
    can_sandbox: None, cache: Path, fake: FakeBeaker, greeting: HarborTask
) -> None:
    outcome, policy = played(greeting, [make_reply(DO), *DONE])
    assert (outcome.reward, outcome.truncated, len(policy.turns)) == (1.0, False, 3)
    assert outcome.metrics["seconds/verifier"] > 0
    assert (fake.over, fake.cancelled, len(fake.submitted)) == (True, 1, 1)


def test_an_agent_that_times_out_in_a_job_is_graded_there(
    can_sandbox: None, cache: Path, fake: FakeBeaker, greeting: HarborTask, agent_time: AgentTime
) -> None:
    late = replace(greeting, settings=replace(greeting.settings, agent_timeout_s=agent_time.limit_s))
    outcome, _ = played(late, Late([make_reply(DO), make_reply("sleep 60\n", duration=60)], agent_time))
    assert (outcome.reward, outcome.truncated) == (1.0, True)
    assert (fake.over, fake.cancelled) == (True, 1)


def test_a_trial_whose_model_fails_leaves_no_job(
    can_sandbox: None, cache: Path, fake: FakeBeaker, greeting: HarborTask
) -> None:
    policy = recording(Faulty([make_reply(DO)], failing=range(1, 9)))

    @stop_leftover_tasks()
    async def main() -> None:
        with pytest.raises(ServiceError):
            await greeting.rollout(policy)

    threads.run(main())
    assert (fake.over, fake.cancelled) == (True, 1)


def test_an_interrupted_trial_leaves_no_job(
    can_sandbox: None, cache: Path, fake: FakeBeaker, greeting: HarborTask
) -> None:
    policy = recording(Faulty([make_reply(DO)], hanging=1))

    @stop_leftover_tasks()
    async def main() -> None:
        playing = asyncio.create_task(greeting.rollout(policy))
        while not policy.turns:
            await asyncio.sleep(0.02)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    threads.run(main())
    assert (fake.over, fake.cancelled) == (True, 1)
