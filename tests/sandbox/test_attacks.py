"""Attacks by a command in a sandbox, and their effects."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlkit.sandbox import CommandTimeout, Limits, Sandbox
from rlkit.sandbox.spec import MIB
from tests.limits import HANG_S, wait_until

Playing = Callable[..., None]
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="the sandbox's root is the host's only if the tests are")


async def output(sandbox: Sandbox, command: str) -> str:
    done = await sandbox.run(command, timeout_s=HANG_S)
    return (done.stdout + done.stderr).decode(errors="replace")


def test_only_the_system_files_of_the_host_are_visible(
    playing: Playing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "sesame")
    (tmp_path / "secret").write_text("sesame")

    async def play(sandbox: Sandbox) -> None:
        assert await output(sandbox, "ls -A /root /home /srv /mnt /tmp /opt | grep -v ':' | xargs") == "\n"
        assert "No such file" in await output(sandbox, f"cat {tmp_path}/secret")
        assert "No such file" in await output(sandbox, "cat /etc/shadow")
        assert "SECRET" not in await output(sandbox, "env; cat /proc/[0-9]*/environ")
        assert "sesame" not in await output(
            sandbox, f"cat /proc/1/root/{tmp_path}/secret /proc/1/cwd/../{tmp_path}/secret"
        )

    playing(play)


def test_written_files_stay_in_the_sandbox(playing: Playing) -> None:
    mark = f"/usr/lib/rlkit-{os.getpid()}"

    async def play(sandbox: Sandbox) -> None:
        await output(sandbox, f"echo x > {mark}; rm -rf /usr/bin/env /etc/passwd; echo x > /etc/hostname")
        assert await output(sandbox, f"cat {mark}") == "x\n"

    before = Path("/etc/passwd").read_bytes()
    playing(play)
    assert not Path(mark).exists()
    assert Path("/usr/bin/env").exists()
    assert Path("/etc/passwd").read_bytes() == before


def test_the_kernel_is_out_of_reach(playing: Playing) -> None:
    tries = (
        "mount -t tmpfs none /mnt",
        "umount /proc/sys",
        "mount -o remount,rw /proc/sys",
        "unshare --user true",
        "unshare --mount true",
        "nsenter --target 1 --mount true",
        "echo 1 > /proc/sys/kernel/panic",
        "echo b > /proc/sysrq-trigger",
        "mknod /tmp/disk b 254 0 && head -c 1 /tmp/disk",
        "chroot / true",
        "dmesg --clear",
        "hostname changed",
        "date -s 2000-01-01",
        "nice -n -5 true 2>&1 | grep -q cannot && false",
    )

    async def play(sandbox: Sandbox) -> None:
        for attempt in tries:
            assert (await sandbox.run(attempt, timeout_s=HANG_S)).exit_code != 0, attempt

    playing(play)


@AS_ROOT
def test_the_hosts_devices_keep_their_permissions(playing: Playing) -> None:
    before = Path("/dev/null").stat()

    async def play(sandbox: Sandbox) -> None:
        await output(sandbox, "chmod 000 /dev/null; chown 12 /dev/zero; rm /dev/random")

    playing(play)
    assert Path("/dev/null").stat().st_mode == before.st_mode
    assert Path("/dev/zero").stat().st_uid == 0
    assert Path("/dev/random").exists()


def test_no_process_of_the_host_can_be_seen_traced_or_killed(playing: Playing) -> None:
    with subprocess.Popen(["sleep", "60"]) as victim:

        async def play(sandbox: Sandbox) -> None:
            listed = (await output(sandbox, "ls /proc")).split()
            assert str(victim.pid) not in listed
            await output(sandbox, f"kill -9 {victim.pid} -1; kill -9 1; kill -INT 1; kill -TERM 1")
            assert "denied" in await output(sandbox, "cat /proc/1/environ")
            assert "denied" in await output(sandbox, "cat /proc/1/maps")
            assert "denied" in await output(sandbox, "readlink -v /proc/1/fd/3")
            assert "denied" in await output(sandbox, "head -c 1 /proc/1/mem")
            assert await output(sandbox, "echo alive") == "alive\n"

        try:
            playing(play)
            assert victim.poll() is None
        finally:
            victim.kill()


def test_privileges_cannot_be_gained(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        status = await output(sandbox, "cat /proc/self/status")
        lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert int(lines["CapEff"], 16) == int(lines["CapBnd"], 16) == 0b10011111011
        assert lines["NoNewPrivs"] == "1"
        if os.geteuid() == 0:
            await output(sandbox, "cp /usr/bin/id /usr/bin/root-id && chmod 4755 /usr/bin/root-id")
            assert (await sandbox.run("/usr/bin/root-id -u", user="nobody")).stdout == b"65534\n"

    playing(play)


def test_there_is_no_network_unless_it_is_enabled(playing: Playing) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reach = f"exec 3<>/dev/tcp/127.0.0.1/{port}"

        async def without(sandbox: Sandbox) -> None:
            assert (await sandbox.run(reach)).exit_code != 0
            assert (await output(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1 | xargs")).split() == ["lo"]

        async def with_it(sandbox: Sandbox) -> None:
            assert (await sandbox.run(reach)).exit_code == 0

        playing(without)
        playing(with_it, network=True)


def test_sockets_that_ignore_namespaces_are_blocked(playing: Playing) -> None:
    tries = """if True:
        import socket
        for family in (1, 2, 10, 16, 17, 38, 40):
            try:
                socket.socket(family, socket.SOCK_RAW if family == 16 else socket.SOCK_DGRAM)
                print(family)
            except OSError as error:
                print(family, error.errno)
    """

    async def play(sandbox: Sandbox) -> None:
        result = await sandbox.run(["python3", "-c", tries], timeout_s=HANG_S)
        assert result.stdout.decode().splitlines() == ["1", "2", "10", "16", "17 97", "38 97", "40 97"]

    for network in (False, True):
        playing(play, network=network)


def test_a_fork_bomb_stays_in_its_sandbox(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        if any("any number of processes" in description for description in sandbox.limit_descriptions):
            pytest.skip("as root without a control group nothing limits processes")
        with pytest.raises(CommandTimeout):
            await sandbox.run("bomb() { bomb | bomb & }; bomb; sleep 30", timeout_s=1)
        subprocess.run(["true"], check=True, timeout=HANG_S)

    playing(play, limits=Limits(processes=40))


def test_a_memory_hog_is_killed_and_the_sandbox_survives(playing: Playing) -> None:
    hog = "head -c 400000000 /dev/zero | tail -c 400000000 | wc -c"

    async def play(sandbox: Sandbox) -> None:
        assert "400000000" not in await output(sandbox, hog)
        assert await output(sandbox, "echo alive") == "alive\n"

    playing(play, limits=Limits(memory_bytes=64 * MIB))


def test_a_huge_file_and_a_long_computation_are_stopped(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        await output(sandbox, "head -c 100000000 /dev/zero > /big")
        assert int(await output(sandbox, "stat -c %s /big")) == 4 * MIB
        await sandbox.run("while :; do :; done", timeout_s=HANG_S)  # or it raises

    playing(play, limits=Limits(file_bytes=4 * MIB, cpu_s=1))


def test_links_do_not_lead_a_copy_astray(playing: Playing, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").symlink_to(outside)
    script = f"""mkdir -p /out/deep /out/old && cd /out && ln -s {outside} absolute && ln -s ../outside up
ln -s .. deep/top && ln -s deep/top/../outside sly && ln -s deep fine && mkfifo pipe && echo new > old/kept
echo x > setuid && chmod 4777 setuid"""

    async def play(sandbox: Sandbox) -> None:
        assert (await sandbox.run(script)).exit_code == 0
        await sandbox.get("/out", target, folder=True)
        (tmp_path / "new").write_text("new")
        await sandbox.run(f"mkdir -p {outside}; ln -s {outside} /into; ln -s /nowhere /broken")
        await sandbox.put(tmp_path / "new", "/into/kept")
        await sandbox.put(tmp_path / "new", "/broken/kept")
        assert await output(sandbox, f"cat {outside}/kept /broken/kept") == "newnew"

    playing(play)
    assert (outside / "kept").read_text() == "kept"
    assert sorted(path.name for path in target.iterdir()) == ["deep", "fine", "old", "setuid"]
    assert (target / "old" / "kept").read_text() == "new\n"
    assert (target / "setuid").stat().st_mode & 0o7000 == 0


def test_a_planted_file_is_replaced_by_the_copied_file(playing: Playing, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test.sh").write_text("real")

    async def play(sandbox: Sandbox) -> None:
        await output(sandbox, "mkdir /tests; ln -s /usr/bin/true /tests/test.sh")
        await sandbox.put(tmp_path / "tests", "/tests")
        assert await output(sandbox, "cat /tests/test.sh; stat -c %F /tests/test.sh") == "realregular file\n"

    playing(play)


@pytest.mark.parametrize(
    "attack",
    [
        "echo 0:x:0:none::/:/bin/sh > /etc/passwd",
        "rm /etc/passwd; mkdir /etc/passwd",
        "rm /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group",
    ],
)
def test_changed_tables_of_users_do_not_stop_copies(playing: Playing, attack: str, tmp_path: Path) -> None:
    async def play(sandbox: Sandbox) -> None:
        assert (await sandbox.run(f"mkdir /out; echo done > /out/result; {attack}")).exit_code == 0
        async with asyncio.timeout(HANG_S):
            await sandbox.put(Path(__file__), "/out/test.py")
            await sandbox.get("/out", tmp_path, folder=True)
        assert (tmp_path / "result").read_text() == "done\n"
        assert (tmp_path / "test.py").exists()

    playing(play)


def test_odd_names_and_deep_folders_can_be_removed(playing: Playing) -> None:
    deep = (
        "import os\nfor _ in range(3000):\n os.mkdir('d'*200); os.chdir('d'*200)\n"
        "os.chdir('/'); os.mkdir(b'\\xff\\n-rf'); os.mkdir('locked'); os.chmod('locked', 0)"
    )

    async def play(sandbox: Sandbox) -> None:
        done = await sandbox.run(["python3", "-c", deep], cwd="/tmp", timeout_s=HANG_S)
        if done.exit_code == 126:
            pytest.skip("the system has no python3")
        assert done.exit_code == 0

    playing(play)


def test_leftovers_of_a_killed_owner_are_removed_by_the_next(cache: Path, can_sandbox: None) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, env={**os.environ, "RLKIT_CACHE_DIR": str(cache)}
    )
    assert owner.stdout is not None
    running = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(running) == 16
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until(lambda: not [pid for pid in running if Path(f"/proc/{pid}").exists()])
    assert len(list((cache / "sandbox" / "live").glob("*/rlkit-*"))) == 16
    code = "from rlkit.sandbox import sandbox_folders; sandbox_folders.SandboxFolder(()).remove()"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "RLKIT_CACHE_DIR": str(cache)})
    assert list((cache / "sandbox" / "live").glob("*/rlkit-*")) == []
    assert list(Path("/sys/fs/cgroup").rglob(f"rlkit-{owner.pid}-*")) == []


_OWNER = """
import asyncio
from rlkit.sandbox import Sandbox, Spec, image

async def main():
    made = Spec(trees=image.trees(image.base("host")))
    sandboxes = await asyncio.gather(*(Sandbox.start(made) for _ in range(16)))
    await asyncio.gather(*(sandbox.run("setsid -f sleep 307") for sandbox in sandboxes))
    print(*(sandbox._process.pid for sandbox in sandboxes), flush=True)
    await asyncio.gather(*(sandbox.run("sleep 308; true") for sandbox in sandboxes))

asyncio.run(main())
"""


def test_stopping_a_sandbox_ends_its_daemons(cache: Path, can_sandbox: None) -> None:
    from .conftest import spec

    mark = f"{time.time_ns() % 10**9}.5"

    async def main() -> None:
        sandbox = await Sandbox.start(spec())
        await sandbox.run(f"setsid -f sleep {mark}; setsid -f sh -c 'trap \"\" TERM HUP INT; sleep {mark}; :'")
        await sandbox.stop()

    asyncio.run(main())
    assert mark not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
