"""Ctrl-C and SIGTERM in whole commands on the real engine leave a resumable run and nothing else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.addresses import closed_port
from tests.limits import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes and their sockets are looked up in /proc"),
]

ENV = """
import asyncio, tempfile
import rlkit

class Digits(rlkit.Env):
    def __init__(self, number):
        self.task_id = str(number)

    async def rollout(self, policy):
        with tempfile.TemporaryDirectory():
            sandbox = await asyncio.create_subprocess_exec("sleep", "600")
            try:
                reply = await policy.sample(f"{self.task_id} ")
            finally:
                sandbox.kill()
                await sandbox.wait()
        return sum(ord("0") <= token <= ord("9") for token in reply.turn.completion) / 4

def tasks():
    return [Digits(number) for number in range(8)]
"""
CONFIG = """
envs: {digits: {env: "env.py:tasks"}}
steps: 100000
batch: {groups: 2, group_size: 4}
sampling: {max_tokens: 4, stop: ["\\0"]}
lora: {rank: 4}
checkpoint: {every: 1}
service: {engine_threads: 1, engine_device: cpu}
"""


@dataclass
class Command:
    """A running command."""

    process: int
    folder: Path
    wait: Callable[[], int]

    def read_stream(self, stream: str) -> str:
        """Return its output so far."""
        path = self.folder / stream
        return path.read_text() if path.exists() else ""

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process, number)

    def until(self, stream: str, count: int, text: str) -> None:
        """Wait until the stream contains a text `count` times."""
        wait_until(lambda: self.read_stream(stream).count(text) >= count, why=lambda: self.read_stream("err"))

    def ports(self) -> set[int]:
        """Return the ports on which the command listens."""
        sockets = set[str]()
        for entry in Path(f"/proc/{self.process}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has just been closed
                sockets.add(str(entry.readlink()))
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listening = "0A"
        return {
            int(row[1].partition(":")[2], 16) for row in rows if row[3] == listening and f"socket:[{row[9]}]" in sockets
        }

    def relatives(self) -> list[int]:
        """Return the running processes of its session, itself included."""
        processes = list[int]()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):  # it has just ended
                    after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                    if after_name[3] == str(self.process) and after_name[0] != "Z":  # one that ended is init's to bury
                        processes.append(int(entry.name))
        return processes


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    """Commands are forked from one process that has imported everything."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.cli.nursery"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == "ready"
        yield process
        process.stdin.close()


@pytest.fixture
def rlkit_(nursery: subprocess.Popen[str], tmp_path: Path, byte_model_dir: Path) -> Iterator[Callable[..., Command]]:
    """Start a command in a new project."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "env.py").write_text(ENV)
    (tmp_path / "config.yaml").write_text(f"model: {byte_model_dir}\n{CONFIG}")
    environ = {
        "RLKIT_RUNS_DIR": str(tmp_path / "runs"),
        "RLKIT_ENGINE_DIR": str(tmp_path / "engine"),
        "TMPDIR": str(tmp_path / "tmp"),
        "TINKER_TELEMETRY": "0",
    }

    def ask(request: Any) -> Any:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        nursery.stdin.write(json.dumps(request) + "\n")
        nursery.stdin.flush()
        return json.loads(nursery.stdout.readline())

    def start(*arguments: str) -> Command:
        process = ask({"arguments": arguments, "folder": str(tmp_path), "environ": environ})
        started.append(Command(process, tmp_path, lambda: ask("wait")))
        return started[-1]

    started = list[Command]()
    yield start
    for command in started:
        for process in command.relatives():
            os.kill(process, signal.SIGKILL)


def assert_nothing_left(command: Command, ports: set[int]) -> None:
    """Assert that no process, port and temporary file is left."""
    assert command.relatives() == []
    for port in ports:
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
    assert list((command.folder / "tmp").iterdir()) == []
    assert list(command.folder.rglob("*.tmp")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "mode"),
    [
        ([signal.SIGINT], "sync"),
        ([signal.SIGTERM], "async"),
        ([signal.SIGINT, signal.SIGINT], "sync"),
        ([signal.SIGINT, signal.SIGTERM], "async"),
    ],
    ids=["SIGINT", "SIGTERM-async", "SIGINT twice", "SIGINT and SIGTERM-async"],
)
def test_signalled_command_leaves_only_a_resumable_run(
    signals: list[signal.Signals], mode: str, rlkit_: Callable[..., Command]
) -> None:
    train = rlkit_("train", "config.yaml", f"schedule.mode={mode}", "--name", "first", "--json")
    train.until("out", 2, '"step"')
    ports = train.ports()
    assert len(ports) == 1
    for number in signals:
        train.send(number)
        train.until("err", 1, "finishing this step, then saving")
    assert train.wait() == 130, train.read_stream("err")
    assert "to resume: rlkit resume first\n" in train.read_stream("err")
    records = [json.loads(line) for line in train.read_stream("out").splitlines()]
    assert_nothing_left(train, ports)
    run = train.folder / "runs" / "first"
    metadata = json.loads((run / "run.json").read_text())
    assert metadata["status"] == "interrupted"
    saved = run / "checkpoints.jsonl"  # missing if the second signal came before the first save was done
    checkpoints = [json.loads(line) for line in saved.read_text().splitlines()] if saved.exists() else []
    steps = len((run / "metrics.jsonl").read_text().splitlines())
    if len(signals) == 1:
        assert (records[-1]["status"], records[-1]["steps"]) == ("interrupted", steps)
        assert records[-1]["checkpoint"]["step"] == checkpoints[-1]["step"] == steps
    else:
        assert records[-1] == {"error": "interrupted", "type": "KeyboardInterrupt", "exit_code": 130}
        assert all(checkpoint["step"] <= steps for checkpoint in checkpoints)
    resume = rlkit_("resume", "first", f"steps={steps + 1}", "--json")
    assert resume.wait() == 0, resume.read_stream("err")
    result = json.loads(resume.read_stream("out").splitlines()[-1])
    assert (result["status"], result["steps"]) == ("completed", steps + 1)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 2))
    assert_nothing_left(resume, ports)


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_the_command(rlkit_: Callable[..., Command]) -> None:
    train = rlkit_("train", "config.yaml", "--name", "first")
    train.until("err", 1, "preparing the run")
    train.send(signal.SIGTERM)
    assert train.wait() == 130, train.read_stream("err")
    first, *others, last = train.read_stream("err").splitlines()
    assert (first, last) == ("preparing the run", "interrupted")
    assert others in ([], ["to resume: rlkit resume first"])  # if the run has a folder already
    assert_nothing_left(train, set())
    resume = rlkit_("train", "config.yaml", "--name", "first", "steps=1", "--resume")
    assert resume.wait() == 0, resume.read_stream("err")


@contextmanager
def service_without_sessions() -> Iterator[str]:
    """A server that is healthy, and answers nothing else."""
    stopped = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            stopped.wait()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()


def configure(folder: Path, url: str, **service: float) -> None:
    """Configure the project for a service, with its key in `.env`."""
    lines = (folder / "config.yaml").read_text().splitlines()
    other_lines = [line for line in lines if not line.startswith("service:")]
    fields = {"base_url": url, **service}
    (folder / "config.yaml").write_text("\n".join([*other_lines, f"service: {json.dumps(fields)}"]))
    (folder / ".env").write_text("TINKER_API_KEY=tml-no-such-key\n")


@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ("train config.yaml --name first", signal.SIGINT),
        pytest.param("train config.yaml --name first", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("eval config.yaml", signal.SIGINT, marks=pytest.mark.slow),
        ("eval config.yaml", signal.SIGTERM),
    ],
)
def test_first_signal_ends_a_command_that_waits_for_its_service(
    arguments: str, number: signal.Signals, rlkit_: Callable[..., Command], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        configure(tmp_path, url)
        command = rlkit_(*arguments.split())
        command.until("err", 1, f"waiting up to 60 s for the service at {url}")
        command.send(number)
        assert command.wait() == 130, command.read_stream("err")
    assert command.read_stream("err").splitlines()[-1] == "interrupted"
    assert "finishing this step" not in command.read_stream("err")
    assert_nothing_left(command, set())


@pytest.mark.parametrize(
    "arguments",
    [
        "train config.yaml --name new",
        "eval config.yaml",
        "checkpoints list first",
        "train --dry-run --pilot 1 config.yaml",
    ],
)
def test_command_reports_an_unreachable_service_and_ends(
    arguments: str, rlkit_: Callable[..., Command], tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    configure(tmp_path, url, connect_timeout_s=1)
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "config.yaml").write_text((tmp_path / "config.yaml").read_text())
    command = rlkit_(*arguments.split())
    code = command.wait()
    output = command.read_stream("err") + command.read_stream("out")
    assert code == 3, output
    assert output.count(f"waiting up to 1 s for the service at {url}: connection refused") == 1
    message = f"the service at {url} (service.base_url is set) cannot be reached: connection refused; gave up after 1 s"
    assert output.count(message) == 1
    assert "Traceback" not in output
    assert_nothing_left(command, set())


def test_service_that_opens_no_session_is_abandoned(rlkit_: Callable[..., Command], tmp_path: Path) -> None:
    with service_without_sessions() as url:
        configure(tmp_path, url, connect_timeout_s=1)
        train = rlkit_("train", "config.yaml", "--name", "first")
        assert train.wait() == 3, train.read_stream("err")
    output = train.read_stream("err")
    assert f"the service at {url} (service.base_url is set) opens no session: no answer; gave up after 1 s" in output
    assert "Traceback" not in output
    # The run has finished nothing, and its name can be used again.
    assert json.loads((tmp_path / "runs" / "first" / "run.json").read_text())["status"] == "failed"


def test_a_command_that_fails_leaves_nothing_running(rlkit_: Callable[..., Command]) -> None:
    train = rlkit_("train", "config.yaml", "--name", "first", "--json", "rollouts.timeout_s=0.02")
    assert train.wait() == 1, train.read_stream("err")
    assert "longer than 0.02 s" in json.loads(train.read_stream("out").splitlines()[-1])["error"]
    assert_nothing_left(train, set())
