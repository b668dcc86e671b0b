from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from rlkit.service.connect import ServiceChoice
from rlkit.tools import doctor, time_limits
from tests.addresses import status_server
from tests.limits import wait_until

SECRET = "tml-canary-0123456789"


def test_this_machine_is_examined_without_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    findings = {finding.subject: finding for finding in doctor.examine_machine(engine=False, environ={})}
    for subject in (
        "python",
        *doctor.PACKAGES,
        "keys",
        "service",
        "default model",
        "runs folder",
        "docker",
        "model programs",
    ):
        assert subject in findings
    assert "engine" not in findings
    assert all(finding.fix for finding in findings.values() if finding.status != "ok")
    assert "embedded engine" in findings["service"].detail


def test_the_layers_around_programs_are_reported_and_weak_ones_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.check_model_programs()
    assert "no_new_privs" in finding.detail
    assert finding.status == ("ok" if finding.detail.startswith("isolation 'os'") else "warn")
    from rlkit.sandbox.inside import landlock, program_filter

    if not landlock.version() or program_filter.program() is None:
        return
    from rlkit.sandbox.runners import fork_server

    class WithoutLandlock(fork_server.ForkServer):
        def __init__(self, **given: object) -> None:
            layers = [layer for layer in fork_server.LAYERS if layer != "landlock"]
            super().__init__(**{**given, "layers": layers})  # pyright: ignore

    monkeypatch.setattr(fork_server, "ForkServer", WithoutLandlock)
    weak = doctor.check_model_programs()
    assert weak.status == "warn"
    assert weak.detail.startswith("isolation 'limits'")
    assert "without landlock" in weak.detail
    assert "min_isolation" in weak.fix


def test_of_a_key_only_the_name_is_told() -> None:
    finding = doctor.check_keys({"TINKER_API_KEY": SECRET, "HF_TOKEN": ""})
    assert finding.status == "ok"
    assert "set: TINKER_API_KEY;" in finding.detail
    assert "HF_TOKEN" in finding.detail.split("not set:")[1]
    assert SECRET not in repr(finding)


@pytest.mark.parametrize("value", [f" {SECRET}", f"'{SECRET}'", f'"{SECRET}"', f"{SECRET}\n", "sk-canary-0123456789"])
def test_a_key_of_the_wrong_shape_is_a_warning_with_a_fix(value: str) -> None:
    finding = doctor.check_keys({"TINKER_API_KEY": value})
    assert finding.status == "warn"
    assert "TINKER_API_KEY" in finding.fix
    assert "canary" not in repr(finding)


@pytest.mark.parametrize("status", [200, 401, 403])
def test_a_service_that_answers_is_reachable(status: int) -> None:
    with status_server(status) as address:
        assert doctor.check_service(ServiceChoice("url", f"http://{address}/", "TINKER_BASE_URL is set")).status == "ok"


@pytest.mark.parametrize("status", [404, 502])
def test_a_server_that_is_no_tinker_service_fails(status: int) -> None:
    with status_server(status) as address:
        finding = doctor.check_service(ServiceChoice("url", f"http://{address}", "TINKER_BASE_URL is set"))
    assert finding.status == "fail"
    assert str(status) in finding.detail
    assert finding.fix


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "not a url", "ftp://127.0.0.1", "http://[::1"])
def test_an_address_where_nothing_answers_fails_in_one_line(url: str) -> None:
    finding = doctor.check_service(ServiceChoice("url", url, "TINKER_BASE_URL is set"), timeout_s=2)
    assert finding.status == "fail"
    assert "\n" not in finding.detail


def test_a_service_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def hang(url: str, **_: object) -> httpx.Response:
        answers.wait()
        return httpx.Response(200)

    monkeypatch.setattr(httpx, "get", hang)
    try:
        finding = doctor.check_service(ServiceChoice("url", "http://127.0.0.1", "x"), timeout_s=0.1)
    finally:
        answers.set()
    assert finding.status == "fail"


def test_a_runs_folder_below_a_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "file" / "runs"))
    finding = doctor.check_runs_folder()
    assert finding.status == "fail"
    assert "RLKIT_RUNS_DIR" in finding.fix


def test_a_runs_folder_that_does_not_exist_yet_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "a" / "b"))
    assert doctor.check_runs_folder().status != "fail"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "status"), [(10**12, "ok"), (10**9, "warn"), (10**6, "fail")])
def test_free_space_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))

    class Usage:
        def __init__(self) -> None:
            self.free = free

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage())
    assert doctor.check_runs_folder().status == status


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_an_engine_that_cannot_start_fails_only_where_it_is_needed() -> None:
    broken = "from rlkit.tools import engine_probe as probe\ndef no(line): raise OSError('no threads left\\nat all')\n"
    command = program(broken + "import rlkit.testing; rlkit.testing.byte_model = no\nraise SystemExit(probe.main())")
    failing = doctor.check_engine(needed=True, command=command)
    assert (failing.status, failing.detail) == ("fail", "OSError: no threads left")
    assert doctor.check_engine(needed=False, command=program("raise SystemExit(1)")).status == "warn"
    killed = doctor.check_engine(needed=True, command=program("import os; os.kill(os.getpid(), 9)"))
    assert killed.detail == "exit code -9 without output"


def test_an_engine_that_takes_long_is_awaited_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "PROGRESS_S", 0.2)
    said = list[str]()
    slow = "import sys, time\nprint('compiling', flush=True)\nwhile not sys.argv[1:]: time.sleep(1); break"
    found = doctor.check_engine(needed=True, command=program(slow), note=said.append)
    assert found.status == "ok"
    assert any(line.startswith("engine: compiling (") for line in said)


def test_an_engine_that_never_comes_is_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    stuck = f"sleep 600 & echo $! > {shlex.quote(str(tmp_path / 'pid'))}; echo compiling; wait"
    found = doctor.check_engine(needed=True, command=["sh", "-c", stuck], timeout_s=3)
    assert (found.status, found.detail) == ("fail", "not ready within 3 s; last: compiling")
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.fixture
def docker_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., doctor.Finding]:
    """What is found with a client of Docker's that does what a script does."""

    def found(script: str, *, timeout_s: float = 30) -> doctor.Finding:
        client = tmp_path / "bin" / "docker"
        client.parent.mkdir(exist_ok=True)
        client.write_text(f"#!/bin/sh\n{script}\n")
        client.chmod(0o755)
        monkeypatch.setenv("PATH", f"{client.parent}:/usr/bin:/bin")
        return doctor.check_docker(timeout_s=timeout_s)

    return found


def test_docker_is_asked_whether_its_engine_answers(docker_says: Callable[..., doctor.Finding]) -> None:
    good = docker_says('if [ "$1" = info ]; then echo 27.1.1; else echo 2.29.0; fi')
    assert (good.status, good.detail) == ("ok", "engine 27.1.1, compose 2.29.0")
    silent = docker_says("echo 'Cannot connect to the Docker daemon at unix:///var/run/docker.sock.' >&2; exit 1")
    assert silent.status == "warn"
    assert silent.detail == "`docker info`: Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
    assert "start the Docker daemon" in silent.fix
    bare = docker_says(
        '[ "$1" = info ] && echo 27.1.1 && exit; echo "docker: compose is not a docker command" >&2; exit 1'
    )
    assert (bare.status, bare.detail) == ("warn", "`docker compose version`: docker: compose is not a docker command")
    assert "install" in bare.fix


def test_docker_that_never_answers_is_one_line(docker_says: Callable[..., doctor.Finding]) -> None:
    found = docker_says("sleep 600 & wait", timeout_s=0.5)
    assert (found.status, found.detail) == ("warn", "`docker info` did not answer within 0.5 s")


def test_a_disk_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(doctor, "FOLDER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(doctor, "check_runs_folder", ended.wait)
    found = {finding.subject: finding for finding in doctor.examine_machine(engine=False, environ={})}["runs folder"]
    ended.set()
    assert (found.status, found.detail) == ("fail", "no answer within 0.2 s")


@pytest.mark.timeout(600)
def test_the_real_engine_is_tried_in_a_process_of_its_own() -> None:
    found = doctor.check_engine(needed=True)
    assert found.status == "ok", found.detail


def test_a_package_that_is_too_old_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.1" if name == "tinker" else real(name))
    findings = {finding.subject: finding for finding in doctor.check_packages()}
    assert findings["tinker"].status == "fail"
    assert "0.1, but rlkit needs" in findings["tinker"].detail
    assert findings["torch"].status == "ok"
