"""Servers that a run starts."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from rlkit.envs.openreward.connection.servers import local_server
from rlkit.errors import UsageError
from tests.limits import HANG_S, wait_until

HEALTHY = """
import http.server, pathlib, subprocess, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments): pass

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[2]).write_text(f"{__import__('os').getpid()} {child.pid}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "server.py").write_text(HEALTHY)
    return ["python", str(tmp_path / "server.py"), "{port}", str(tmp_path / "pids")]


def pids(tmp_path: Path) -> list[int]:
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(*processes: int) -> None:
    wait_until(lambda: all(map(has_ended, processes)), why=lambda: processes)


def test_a_server_is_shared_and_ends_with_its_last_user_and_all_that_it_started(
    command: list[str], tmp_path: Path
) -> None:
    server = local_server(command, within_s=HANG_S)
    assert local_server(command, within_s=HANG_S) is server
    with urllib.request.urlopen(f"{server.url}/health") as answer:
        assert answer.status == 200
    assert pickle.loads(pickle.dumps(server)) is None
    running = pids(tmp_path)
    assert not any(map(has_ended, running))
    del server
    gc.collect()
    wait_until_gone(*running)


def test_a_server_that_exits_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        HEALTHY.replace(".serve_forever()", ".handle_request(); print('out of memory')")
    )
    server = local_server(["python", str(tmp_path / "server.py"), "{port}", str(tmp_path / "pids")], within_s=HANG_S)
    wait_until_gone(pids(tmp_path)[0])
    server._process.wait(HANG_S)
    with pytest.raises(UsageError, match=r"server: `.*server.py .*` ended with exit code 0: out of memory"):
        server.check()
    server.close()


def test_a_server_ends_when_its_run_is_killed(command: list[str], tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom rlkit.envs.openreward.connection.servers import local_server\n"
        f"held = local_server(sys.argv[1:], within_s={HANG_S})\nprint('up', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, *command], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"up\n"
        running = pids(tmp_path)
        os.kill(run.pid, signal.SIGKILL)
    wait_until_gone(*running)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("python server.py", r"server: 'python server.py' has no placeholder for the port; write \{port\}"),
        ("", "server: '' has no placeholder"),
        ("'python {port}", "server: .* is not a valid command: No closing quotation"),
        ("python -c 'raise SystemExit(\"no licence\")' {port}", "ended with exit code 1: no licence"),
        ("no-such-program {port}", "ended with exit code 1: .*no-such-program"),
        ("python -c 'import time; time.sleep(60)' {port}", "does not answer at .*/health within 0.5 s"),
    ],
)
def test_a_command_that_starts_no_server_is_a_one_line_error(command: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        local_server(command, within_s=0.5 if "sleep" in command else HANG_S)
