from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from rlkit._util import threads
from rlkit.tinker_client.connect import ServiceChoice
from rlkit.tools import doctor
from tests.addresses import status_server
from tests.limits import wait_until

SECRET = "tml-canary-0123456789"


def test_machine_is_examined_without_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_sandbox_layers_are_reported_and_weak_ones_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.check_model_programs()
    assert "no_new_privs" in finding.detail
    assert finding.status == ("ok" if finding.detail.startswith("isolation 'os'") else "warn")
    from rlkit.sandbox.inside import landlock, program_filter

    if not landlock.version() or program_filter.program() is None:
        return
    from rlkit.sandbox.runners import fork_server

    class WithoutLandlock(fork_server.ForkServer):
        def __init__(self, **settings: object) -> None:
            layers = [layer for layer in fork_server.LAYERS if layer != "landlock"]
            super().__init__(**{**settings, "layers": layers})  # pyright: ignore

    monkeypatch.setattr(fork_server, "ForkServer", WithoutLandlock)
    weak = doctor.check_model_programs()
    assert weak.status == "warn"
    assert weak.detail.startswith("isolation 'limits'")
    assert "without landlock" in weak.detail
    assert "min_isolation" in weak.fix


def test_key_is_reported_by_name_only() -> None:
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
def test_server_without_the_tinker_api_fails(status: int) -> None:
    with status_server(status) as address:
        finding = doctor.check_service(ServiceChoice("url", f"http://{address}", "TINKER_BASE_URL is set"))
    assert finding.status == "fail"
    assert str(status) in finding.detail
    assert finding.fix


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "not a url", "ftp://127.0.0.1", "http://[::1"])
def test_unreachable_address_fails_with_one_line(url: str) -> None:
    finding = doctor.check_service(ServiceChoice("url", url, "TINKER_BASE_URL is set"), timeout_s=2)
    assert finding.status == "fail"
    assert "\n" not in finding.detail


def test_silent_service_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_missing_runs_folder_is_not_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "a" / "b"))
    assert doctor.check_runs_folder().status != "fail"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "status"), [(10**12, "ok"), (10**9, "warn"), (10**6, "fail")])
def test_low_free_space_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))

    class Usage:
        def __init__(self) -> None:
            self.free = free

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage())
    assert doctor.check_runs_folder().status == status


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_engine_that_cannot_start_fails_only_if_needed() -> None:
    broken = "from rlkit.tools import engine_probe as probe\ndef no(line): raise OSError('no threads left\\nat all')\n"
    command = program(broken + "import rlkit.testing; rlkit.testing.byte_model = no\nraise SystemExit(probe.main())")
    failing = doctor.check_engine(needed=True, command=command)
    assert (failing.status, failing.detail) == ("fail", "OSError: no threads left")
    assert doctor.check_engine(needed=False, command=program("raise SystemExit(1)")).status == "warn"
    killed = doctor.check_engine(needed=True, command=program("import os; os.kill(os.getpid(), 9)"))
    assert killed.detail == "exit code -9 without output"


def test_slow_engine_is_awaited_with_progress_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PROGRESS_S", 0.2)
    noted = tmp_path / "noted"  # the engine starts once its line was noted
    slow = "import pathlib, sys, time\nprint('compiling', flush=True)\n"
    slow += "while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)"

    def note(line: str) -> None:
        if line.startswith("engine: compiling ("):
            noted.touch()

    finding = doctor.check_engine(needed=True, command=[*program(slow), str(noted)], note=note)
    assert finding.status == "ok"
    assert noted.exists()


def test_engine_that_never_starts_is_one_line_and_leaves_no_process(tmp_path: Path) -> None:
    stuck = f"sleep 600 & echo $! > {shlex.quote(str(tmp_path / 'pid'))}; echo compiling; wait"
    finding = doctor.check_engine(needed=True, command=["sh", "-c", stuck], timeout_s=3)
    assert (finding.status, finding.detail) == ("fail", "not ready within 3 s; last: compiling")
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    wait_until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.fixture
def docker_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., doctor.Finding]:
    """Return a function that checks Docker with a script as its client."""

    def check_docker(script: str, *, timeout_s: float = 30) -> doctor.Finding:
        client = tmp_path / "bin" / "docker"
        client.parent.mkdir(exist_ok=True)
        client.write_text(f"#!/bin/sh\n{script}\n")
        client.chmod(0o755)
        monkeypatch.setenv("PATH", f"{client.parent}:/usr/bin:/bin")
        return doctor.check_docker(timeout_s=timeout_s)

    return check_docker


def test_docker_check_reports_engine_and_compose(docker_says: Callable[..., doctor.Finding]) -> None:
    working = docker_says('if [ "$1" = info ]; then echo 27.1.1; else echo 2.29.0; fi')
    assert (working.status, working.detail) == ("ok", "engine 27.1.1, compose 2.29.0")
    silent = docker_says("echo 'Cannot connect to the Docker daemon at unix:///var/run/docker.sock.' >&2; exit 1")
    assert silent.status == "warn"
    assert silent.detail == "`docker info`: Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
    assert "start the Docker daemon" in silent.fix
    without_compose = docker_says(
        '[ "$1" = info ] && echo 27.1.1 && exit; echo "docker: compose is not a docker command" >&2; exit 1'
    )
    assert (without_compose.status, without_compose.detail) == (
        "warn",
        "`docker compose version`: docker: compose is not a docker command",
    )
    assert "install" in without_compose.fix


def test_silent_docker_is_reported_in_one_line(docker_says: Callable[..., doctor.Finding]) -> None:
    finding = docker_says("sleep 600 & wait", timeout_s=0.5)
    assert (finding.status, finding.detail) == ("warn", "`docker info` did not answer within 0.5 s")


def test_unresponsive_disk_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    test_is_over = threading.Event()
    monkeypatch.setattr(doctor, "FOLDER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(doctor, "check_runs_folder", test_is_over.wait)
    finding = {finding.subject: finding for finding in doctor.examine_machine(engine=False, environ={})}["runs folder"]
    test_is_over.set()
    assert (finding.status, finding.detail) == ("fail", "no answer within 0.2 s")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_engine_starts_in_its_own_process() -> None:
    finding = doctor.check_engine(needed=True)
    assert finding.status == "ok", finding.detail


def test_the_other_library_named_rlkit_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    about = tmp_path / "rlkit-0.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rlkit\nVersion: 0.2\n")
    assert "rlkit" not in {finding.subject for finding in doctor.check_packages()}
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = [finding for finding in doctor.check_packages() if finding.subject == "rlkit"]
    assert finding.status == "fail"
    assert "pip uninstall rlkit rlkit-tinker" in finding.fix


def test_a_package_that_is_too_old_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.1" if name == "tinker" else real(name))
    findings = {finding.subject: finding for finding in doctor.check_packages()}
    assert findings["tinker"].status == "fail"
    assert "0.1, but rlkit needs" in findings["tinker"].detail
    assert findings["torch"].status == "ok"


def test_an_extra_of_another_package_is_installed_if_its_packages_are() -> None:
    findings = {finding.subject: finding.detail for finding in doctor.check_extras()}
    assert ("not installed: modal" in findings["extra modal"]) == (find_spec("modal") is None)
    assert findings["extra discovery"] == "installed"
