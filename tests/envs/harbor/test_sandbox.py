from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rlkit.errors import EnvironmentFault, UsageError
from rlkit.sandbox import CommandTimeout
from tests.limits import wait_until

from .conftest import left, write_task

pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]


async def trial(task: Path, *, agent: str = "oracle", verifier: dict[str, str] | None = None, **environment: object):
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
    from harbor.trial.trial import Trial

    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=task.parent / "trials",
        agent=AgentConfig(name=agent),
        verifier=VerifierConfig(**verifier or {}),
        environment=EnvironmentConfig(import_path="rlkit.envs.harbor.sandbox:LocalSandbox", **environment),
    )
    return await (await Trial.create(config)).run()


def make_environment(task: Path, **settings: object):
    """The environment as Harbor makes it, without a trial around it."""
    from harbor.models.task.task import Task
    from harbor.models.trial.paths import TrialPaths

    from rlkit.envs.harbor.sandbox import LocalSandbox

    paths = TrialPaths(task.parent / "trial")
    paths.mkdir()
    harbor_task = Task(task)
    return LocalSandbox(
        environment_dir=harbor_task.paths.environment_dir,
        environment_name="tiny_task",
        session_id="tiny_task__1__env",
        trial_paths=paths,
        task_env_config=harbor_task.config.environment,
        logger=logging.getLogger("test"),
        **settings,
    )


def run_in_environment(task: Path, function: Callable[..., Awaitable[None]], **settings: object) -> None:
    async def main() -> None:
        environment = make_environment(task, **settings)
        await environment.start(force_build=False)
        try:
            await function(environment)
        finally:
            await environment.stop(delete=True)

    asyncio.run(main())


def test_a_trial_with_the_solution_gets_its_reward_and_one_without_does_not(cache: Path, task: Path) -> None:
    async def main() -> None:
        solved, untouched = await asyncio.gather(trial(task), trial(task, agent="nop"))
        assert solved.exception_info is None
        assert solved.verifier_result.rewards == {"reward": 1.0}
        assert untouched.verifier_result.rewards == {"reward": 0.0}
        folder = next((task.parent / "trials").glob(f"{solved.trial_name}"))
        assert (folder / "agent" / "oracle.txt").read_text() == "noise\n"
        assert (folder / "verifier" / "reward.txt").read_text() == "1\n"

    asyncio.run(main())


@pytest.mark.slow
def test_64_trials_at_once_leave_nothing(cache: Path, task: Path) -> None:
    async def main() -> None:
        results = await asyncio.gather(*(trial(task) for _ in range(64)))
        assert [result.exception_info for result in results if result.exception_info] == []
        assert {result.verifier_result.rewards["reward"] for result in results} == {1.0}

    asyncio.run(main())
    assert left(cache) == []
    assert list(Path("/sys/fs/cgroup").rglob(f"rlkit-{os.getpid()}-*")) == []


def test_a_killed_trainer_leaves_nothing_after_a_restart(cache: Path, tmp_path: Path) -> None:
    mark = f"sleep {time.time_ns() % 10**9}.5"
    task = write_task(tmp_path / "task", test=f"{mark}\n")
    code = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.envs.harbor.test_sandbox import trial
async def main():
    await asyncio.gather(*(trial(Path({str(task)!r})) for _ in range(8)))
asyncio.run(main())
"""
    env = {**os.environ, "RLKIT_CACHE_DIR": str(cache)}
    log = tmp_path / "log"
    with log.open("w") as output:
        trainer = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=output, stderr=output)
        try:
            while running(mark) < 8:
                assert trainer.poll() is None, log.read_text()
                time.sleep(0.1)
        finally:
            trainer.kill()
            trainer.wait()
    wait_until(lambda: not running(mark))
    restart = "from rlkit.sandbox import sandbox_folders; sandbox_folders.SandboxFolder(()).remove()"
    subprocess.run([sys.executable, "-c", restart], env=env, check=True)
    assert left(cache) == []
    assert list(Path("/sys/fs/cgroup").rglob(f"rlkit-{trainer.pid}-*")) == []


def running(command: str) -> int:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return listed.splitlines().count(command)


def test_a_command_has_the_images_variables_and_folder_and_the_trials(cache: Path, task: Path) -> None:
    async def play(environment: object) -> None:
        done = await environment.exec("echo $GREETING $TRIAL $ASKED; pwd; id -u", env={"ASKED": "yes"})
        assert (done.stdout, done.return_code) == ("hello there yes\n/app\n0\n", 0)
        assert (await environment.exec("pwd; exit 4", cwd="/usr")).return_code == 4
        if os.geteuid() == 0:
            with environment.with_default_user("nobody"):
                assert (await environment.exec("id -u")).stdout == "65534\n"
                assert (await environment.exec("id -u", user="root")).stdout == "0\n"
        with pytest.raises(CommandTimeout, match=r"more than 0\.2 s"):
            await environment.exec("sleep 30", timeout_sec=0.2)
        assert issubclass(CommandTimeout, RuntimeError)  # which is what Harbor's own environments raise

    run_in_environment(task, play, persistent_env={"TRIAL": "there"})


def test_log_folders_are_world_writable_and_not_the_hosts(cache: Path, task: Path) -> None:
    logs = task.parent / "logs"
    logs.mkdir()
    mounts = [{"type": "bind", "source": str(logs), "target": "/logs/agent"}]
    shared = task.parent / "shared"
    shared.mkdir()
    (shared / "given").write_text("given")
    mounts += [{"type": "bind", "source": str(shared), "target": "/data", "read_only": True}]

    async def play(environment: object) -> None:
        assert not environment.capabilities.mounted
        assert (await environment.exec("stat -c %a /logs/agent")).stdout == "777\n"
        assert (
            await environment.exec("cat /data/given; echo x > /data/given || echo refused")
        ).stdout == "givenrefused\n"
        await environment.exec("echo said > /logs/agent/file; ln -s /etc/passwd /logs/agent/link")
        assert list(logs.iterdir()) == []
        await environment.download_dir("/logs/agent", logs)

    run_in_environment(task, play, mounts=mounts)
    assert [path.name for path in logs.iterdir()] == ["file"]


def test_files_are_uploaded_and_downloaded_to_harbors_interface(cache: Path, task: Path, tmp_path: Path) -> None:
    async def play(environment: object) -> None:
        await environment.upload_file(task / "instruction.md", "/elsewhere/instruction.md")
        await environment.upload_dir(task / "tests", "/tests")
        assert await environment.is_file("/tests/test.sh")
        await environment.download_file("/elsewhere/instruction.md", tmp_path / "deep" / "back.md")
        await environment.exec("mkdir -p /out/a /out/b; echo 1 > /out/a/1; echo 2 > /out/b/2")
        await environment.download_dir_with_exclusions(source_dir="/out", target_dir=tmp_path / "some", exclude=["b"])
        await environment.download_dir_filtered(source_dir="/out", target_dir=tmp_path / "more", include=["b/*"])
        for call in (environment.download_file("/nowhere", tmp_path / "x"), environment.download_dir("/x", tmp_path)):
            with pytest.raises(EnvironmentFault):
                await call
        with pytest.raises(EnvironmentFault, match="is a folder"):
            await environment.download_file("/out", tmp_path / "x")

    run_in_environment(task, play)
    assert (tmp_path / "deep" / "back.md").read_text() == "Greet."
    assert [str(path.relative_to(tmp_path / "some")) for path in (tmp_path / "some").rglob("*")] == ["a", "a/1"]
    assert (tmp_path / "more" / "b" / "2").read_text() == "2\n"


def test_the_tasks_limits_and_network_hold(cache: Path, tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        settings='cpus = 1\nmemory_mb = 64\nstorage_mb = 3\nnetwork_mode = "no-network"\nworkdir = "/w"\n',
    )

    async def main() -> None:
        hog = "head -c 400000000 /dev/zero | tail -c 400000000 | wc -c"
        (task / "tests" / "test.sh").write_text(
            f"{hog} > /hog; head -c 9999999 /dev/zero > /big; tail -n +3 /proc/net/dev | cut -d: -f1 | xargs > /net\n"
            "cat /hog /net; stat -c %s /big; pwd; echo 1 > /logs/verifier/reward.txt\n"
        )
        result = await trial(task, agent="nop")
        folder = task.parent / "trials" / result.trial_name
        words = (folder / "verifier" / "test-stdout.txt").read_text().split()
        assert "400000000" not in words
        assert words[-3:] == ["lo", str(3 << 20), "/w"]

    asyncio.run(main())


def test_an_unenforceable_network_policy_is_rejected(cache: Path, tmp_path: Path) -> None:
    from harbor.models.task.config import NetworkMode, NetworkPolicy

    task = write_task(tmp_path / "task")
    policy = NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["example.org"])
    with pytest.raises(ValueError, match="allowlist"):
        make_environment(task, network_policy=policy)
    (task / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(UsageError, match="compose"):
        make_environment(task)


def test_an_unknown_dockerfile_instruction_fails_with_file_and_line(cache: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", dockerfile="FROM x\nVOLUME /data\n")
    with pytest.raises(UsageError, match=r"environment/Dockerfile:2: VOLUME is not supported"):
        asyncio.run(trial(task))


def test_an_image_is_a_folder_or_the_hosts_root(cache: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", settings='docker_image = "example:1"\n', dockerfile=None)

    async def main() -> None:
        environment = make_environment(task)
        await environment.start(force_build=False)
        assert (await environment.exec("pwd; ls")).stdout.split()[0] == "/"
        assert await environment.is_file("/data.txt")
        await environment.stop(delete=True)
        (tmp_path / "trial" / "x").mkdir(exist_ok=True)
        other = make_environment(task, images={"example:1": str(tmp_path)}, rootfs="host")
        with pytest.raises(UsageError, match="is not a root file system"):
            await other.start(force_build=False)

    asyncio.run(main())


def test_before_the_start_and_after_the_stop_nothing_runs(cache: Path, task: Path) -> None:
    async def main() -> None:
        environment = make_environment(task)
        with pytest.raises(EnvironmentFault, match="not been started"):
            await environment.exec("true")
        await environment.start(force_build=False)
        await environment.start(force_build=True)
        await environment.stop(delete=True)
        await environment.stop(delete=False)
        with pytest.raises(EnvironmentFault, match="was stopped"):
            await environment.exec("true")

    asyncio.run(main())


def test_output_of_a_command_is_streamed(cache: Path, task: Path) -> None:
    heard: list[tuple[str, str]] = []

    async def hear(text: str, stream: str) -> None:
        heard.append((text, stream))

    async def play(environment: object) -> None:
        with environment.scoped_output_callback(hear):
            await environment.exec("echo one; sleep 0.2; echo two >&2")

    run_in_environment(task, play)
    assert heard == [("one\n", "stdout"), ("two\n", "stderr")]


def test_a_harbor_job_finds_the_sandbox_by_import_path(cache: Path, task: Path) -> None:
    config = {"import_path": "rlkit.envs.harbor.sandbox:LocalSandbox", "kwargs": {"memory_mb": 512, "processes": 64}}
    result = asyncio.run(trial(task, kwargs=config["kwargs"]))
    assert result.verifier_result.rewards == {"reward": 1.0}
    saved = json.loads((task.parent / "trials" / result.trial_name / "config.json").read_text())
    assert saved["environment"]["import_path"] == config["import_path"]


def test_a_harbor_job_can_use_the_sealed_verifier(cache: Path, task: Path) -> None:
    forger = "while :; do echo '{\"reward\": 0.5}' > /logs/verifier/reward.json; sleep 0.01; done"
    script = f"#!/bin/bash\n(setsid nohup sh -c {shlex.quote(forger)} > /dev/null 2>&1 &)\n"
    (task / "solution" / "solve.sh").write_text(script)
    verifier = {"import_path": "rlkit.envs.harbor.verification.verifier:SealedVerifier"}
    assert asyncio.run(trial(task, verifier=verifier)).verifier_result.rewards == {"reward": 0.0}
