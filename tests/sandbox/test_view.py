"""Views of a sandbox: what a verifier sees, and what nothing that the agent left running can reach."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlkit.errors import EnvironmentFault, MissingError, UsageError
from rlkit.sandbox import Sandbox
from rlkit.sandbox.commands import Commands
from rlkit.sandbox.inside import landlock

Playing = Callable[..., None]
OWN = ("/tests", "/logs/verifier")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or landlock.version() < 2, reason="this kernel's Landlock cannot seal a view"
)

# Python, since a shell cannot trace: what a process of the sandbox may try against one of the view, by its number.
REACH = """
import ctypes, os, resource, signal, sys
pid = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)

def written(path):
    with open(path, "w") as file:
        file.write("forged")
    return True

def opened(path):
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)

def traced():
    return libc.ptrace(16, pid, 0, 0) == 0

def read():
    data = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(data), 8)
    return libc.process_vm_readv(pid, vector, 1, vector, 1, 0) > 0

tries = {
    "root": lambda: written(f"/proc/{pid}/root/logs/verifier/reward.txt"),
    "cwd": lambda: opened(f"/proc/{pid}/cwd/"),
    "task": lambda: opened(f"/proc/{pid}/task/{pid}/root/tests/"),
    "descriptors": lambda: open(f"/proc/{pid}/fd/0"),
    "memory": lambda: open(f"/proc/{pid}/mem", "r+b"),
    "environment": lambda: open(f"/proc/{pid}/environ").read(),
    "trace": traced,
    "read": read,
    "descriptor": lambda: libc.syscall(438, os.pidfd_open(pid), 0, 0) >= 0,
    "stop": lambda: os.kill(pid, signal.SIGSTOP) is None,
    "limit": lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3)) is not None,
}
for name, attempt in tries.items():
    for user in (0, int(sys.argv[2])):
        child = os.fork()
        if child == 0:
            try:
                os.setuid(user)
                os._exit(bool(attempt()))
            except OSError:
                os._exit(0)
        if os.waitpid(child, 0)[1]:
            print("reached by", name, "as", user)
print("tried")
"""


async def output(place: Commands, command: str) -> str:
    done = await place.run(command, timeout_s=60)
    return (done.stdout + done.stderr).decode(errors="replace")


@pytest.mark.parametrize("shared", [None, ("/app",)])
def test_a_daemon_of_the_sandbox_cannot_write_or_see_files_of_the_view(
    playing: Playing, shared: tuple[str, ...] | None
) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run(
            "mkdir -p /app /logs/verifier /tests; echo forged > /logs/verifier/early; echo work > /app/out"
        )
        daemon = "while :; do echo x | tee /logs/verifier/reward.txt /tests/test.sh; sleep 0.01; done"
        await sandbox.run(f"setsid nohup sh -c '{daemon}' > /dev/null 2>&1 &")
        view = await sandbox.open_view(private=OWN, shared=shared)
        assert await output(
            view, "cat /app/out; find /tests /logs/verifier; sleep 0.3; find /tests /logs/verifier"
        ) == ("work\n" + 2 * "/tests\n/logs/verifier\n")
        await view.run("echo sealed > /logs/verifier/reward.txt; echo hidden > /tests/answers")
        assert "sealed" not in await output(sandbox, "cat /logs/verifier/* /tests/*")
        assert "hidden" not in await output(sandbox, "cat /tests/*; find / -name answers -exec cat {} + 2>/dev/null")
        assert await output(view, "sleep 0.1; cat /logs/verifier/reward.txt") == "sealed\n"

    playing(play)


@pytest.mark.parametrize(
    "trick",
    [
        "mv /logs /gone; mkdir -p /logs/verifier; echo forged > /logs/verifier/reward.txt",
        "rm -rf /logs /tests; mkdir /app/verifier; ln -s /app /logs; ln -s /app /tests; echo 1 > /logs/verifier/out",
        "rm -rf /logs/verifier; ln -s /app /logs/verifier; echo forged > /app/reward.txt",
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_a_path_of_the_view_cannot_be_redirected_by_moves_or_links(playing: Playing, trick: str, before: bool) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("mkdir -p /app /logs/verifier /tests")
        if before:
            await sandbox.run(trick)
        view = await sandbox.open_view(private=OWN)
        await view.run("echo true > /logs/verifier/reward.txt")
        if not before:
            await sandbox.run(trick)
        assert await output(view, "cat /logs/verifier/reward.txt; ls /tests") == "true\n"

    playing(play)


@pytest.mark.parametrize("user", ["0", "65534"])
def test_no_process_of_the_sandbox_can_trace_signal_or_enter_one_of_the_view(
    playing: Playing, tmp_path: Path, user: str
) -> None:
    (tmp_path / "reach.py").write_text(REACH)

    async def play(sandbox: Sandbox) -> None:
        await sandbox.put(tmp_path / "reach.py", "/reach.py")
        view = await sandbox.open_view(private=OWN)
        sleeping = asyncio.ensure_future(view.run(["sleep", "3600"], user=user))
        while not (number := (await output(sandbox, "pgrep -x sleep")).strip()):
            await asyncio.sleep(0.02)
        try:
            assert await output(sandbox, f"python3 /reach.py {number} {user}") == "tried\n"
            assert await output(view, f"kill -0 {number} && echo alive") == "alive\n"
        finally:
            sleeping.cancel()

    playing(play)


def test_processes_of_the_sandbox_keep_running_and_a_verifier_can_reach_them(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("mkdir /app; cd /app; sleep 3600 & echo $! > /app/pid")
        view = await sandbox.open_view(private=OWN, shared=("/app",))
        assert await output(view, "kill -0 $(cat /app/pid) && readlink /proc/$(cat /app/pid)/cwd") == "/app\n"
        assert await output(sandbox, "mkdir /a /b; touch /a/f; mv /a/f /b/f; ln /b/f /a/f; ls /a") == "f\n"

    playing(play)


def test_outside_of_named_folders_the_view_is_the_original_image(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run(
            "mkdir /app /srv/data; echo work > /app/out; printf '#!/bin/sh\\necho forged' > /usr/local/bin/cat; "
            "chmod +x /usr/local/bin/cat; echo 'echo forged' > /root/.bashrc; cp /usr/local/bin/cat /usr/bin/env; "
            "echo /app/evil.so > /etc/ld.so.preload; rm /dev/null; echo forged > /dev/null; echo x > /tmp/planted"
        )
        view = await sandbox.open_view(private=OWN, shared=("/app", "/missing", "/srv/data"))
        assert await output(view, "cat /app/out; cat /dev/null; env -i true; ls /tmp /root /missing") == (
            "work\n/missing:\n\n/root:\n\n/tmp:\n"
        )
        assert await output(view, "echo x > /usr/bin/env; echo more > /app/more; echo $?") == "0\n"
        assert "more" in await output(sandbox, "ls /app")

    playing(play)


def test_very_many_entries_do_not_prevent_the_tests(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("mkdir -p /app /logs/artifacts; for n in $(seq 600); do : > /.f$n; : > /logs/f$n; done")
        view = await sandbox.open_view(private=OWN)
        assert await output(view, "ls -d /app /usr; ls -A / | wc -l") == "/app\n/usr\n514\n"  # and /logs, /tests

    playing(play)


@pytest.mark.parametrize("trick", ["echo file > /srv", "ln -s /srv /srv", "ln -s /nowhere /srv", "mkfifo /srv", "true"])
def test_the_tests_run_whatever_replaces_a_folder(playing: Playing, trick: str) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run(f"rm -rf /srv; {trick}")
        view = await sandbox.open_view(private=OWN, shared=("/srv",))
        assert await output(view, "cat /srv 2>/dev/null; ls /srv") == ("file\n/srv\n" if "file" in trick else "")

    playing(play)


def test_a_shared_folder_in_another_one_is_not_mounted_through_the_agents_links(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("mkdir /app; cp /bin/true /usr/bin/cat; ln -s /usr /app/build")
        view = await sandbox.open_view(private=OWN, shared=("/app", "/app/build/bin", "/app/"))
        assert await output(view, "readlink /app/build; cat /proc/self/comm") == "/usr\ncat\n"

    playing(play)


PASS = """
import os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind("\\0passed")
server.listen()
print("ready", flush=True)
descriptors = socket.recv_fds(server.accept()[0], 16, 8)[1]
for descriptor, name in zip(descriptors, ("reward.json", "answers", "tests/answers"), strict=True):
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_PATH):
        try:
            opened = os.open(name, flags, dir_fd=descriptor)
            if flags != os.O_PATH or os.open(f"/proc/self/fd/{opened}", os.O_RDWR):
                print("reached", name, flags)
        except PermissionError:
            pass
    for change, target in ((os.unlink, name), (os.mkdir, name + "2")):
        try:
            change(target, dir_fd=descriptor)
            print("changed", target)
        except PermissionError:
            pass
print("tried")
"""
GIVE = """
import os, socket
client = socket.socket(socket.AF_UNIX)
client.connect("\\0passed")
places = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in ("/logs/verifier", "/tests", "/")]
socket.send_fds(client, [b"x"], places)
"""


@pytest.mark.parametrize("shared", [None, ("/app",)])
def test_a_folder_descriptor_passed_out_of_the_view_is_useless(
    playing: Playing, tmp_path: Path, shared: tuple[str, ...] | None
) -> None:
    """The agent's own code, which tests run in the view, helps a process that the agent left running."""
    for name, text in (("pass.py", PASS), ("give.py", GIVE)):
        (tmp_path / name).write_text(text)

    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("mkdir /app")
        await sandbox.put(tmp_path, "/app")
        view = await sandbox.open_view(private=OWN, shared=shared)
        await view.run("for d in /logs/verifier /tests; do for n in reward.json answers; do echo x > $d/$n; done; done")
        ready = asyncio.Event()

        async def hear(data: bytes, stream: str) -> None:
            ready.set()

        passing = asyncio.ensure_future(sandbox.run("python3 /app/pass.py 2>&1", on_output=hear, timeout_s=60))
        await ready.wait()
        assert await output(view, "python3 /app/give.py") == ""
        assert (await passing).stdout == b"ready\ntried\n"
        assert await output(sandbox, "cat /dev/stdin; echo x | cat /dev/stdin; echo y > /dev/stdout") == "x\ny\n"

    playing(play)


def test_a_second_view_does_not_see_the_first(playing: Playing, tmp_path: Path) -> None:
    async def play(sandbox: Sandbox) -> None:
        (tmp_path / "test.sh").write_text("echo tested")
        for number in range(2):
            view = await sandbox.open_view(private=OWN)
            assert await output(view, "find /tests /logs/verifier -type f") == ""
            await view.put(tmp_path / "test.sh", "/tests/test.sh")
            await view.run("sh /tests/test.sh > /logs/verifier/out; echo x > /on-the-views-root")
            await view.get("/logs/verifier", tmp_path / str(number), folder=True)
            assert (tmp_path / str(number) / "out").read_text() == "tested\n"
        assert "on-the-views-root" not in await output(sandbox, "ls /")

    playing(play)


def test_an_impossible_view_is_an_error_without_side_effects(playing: Playing, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(sandbox: Sandbox) -> None:
        for path in ("/logs", "//logs", "/", "/tests/data", "/logs/verifier"):
            with pytest.raises(UsageError, match="cannot be shared"):
                await sandbox.open_view(private=OWN, shared=(path,))
        with pytest.raises(UsageError, match="absolute"):
            await sandbox.open_view(private=OWN, shared=("app",))
        with pytest.raises(UsageError, match="absolute"):
            await sandbox.open_view(private=OWN, shared=("/app/../logs",))
        sandbox.seal_problem = "the kernel has no Landlock"
        with pytest.raises(MissingError, match="Landlock"):
            await sandbox.open_view(private=OWN)

    playing(play)


def test_closing_a_view_ends_only_its_processes(playing: Playing, tmp_path: Path) -> None:
    (tmp_path / "chain.py").write_text("import os\nwhile True:\n    if os.fork():\n        os._exit(0)\n")

    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("mkdir /app; setsid sleep 3601 > /dev/null 2>&1 &")
        await sandbox.put(tmp_path / "chain.py", "/app/chain.py")
        view = await sandbox.open_view(private=OWN)
        await view.run("setsid sleep 3602 > /dev/null 2>&1 & setsid python3 /app/chain.py > /dev/null 2>&1 &")
        await view.close()
        assert (
            await output(sandbox, "sleep 0.2; pgrep -f '[s]leep 360|[c]hain.py' -a | cut -d' ' -f2-") == "sleep 3601\n"
        )
        assert (await view.run("true")).exit_code == 126
        assert await output(await sandbox.open_view(private=OWN), "echo again") == "again\n"

    playing(play)


def test_a_view_ends_with_its_sandbox(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        view = await sandbox.open_view(private=OWN)
        running = asyncio.ensure_future(view.run("setsid sleep 3601 & sleep 3600"))
        await asyncio.sleep(0.1)
        await sandbox.stop()
        with pytest.raises(EnvironmentFault, match="ended"):
            await running
        with pytest.raises(EnvironmentFault, match="ended"):
            await view.run("true")

    playing(play)
