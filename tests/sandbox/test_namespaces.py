from __future__ import annotations

import asyncio
import contextlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlkit.errors import EnvironmentFault, MissingError, UsageError
from rlkit.sandbox import Bind, CommandTimeout, Limits, Sandbox, Spec
from rlkit.sandbox.files import SourceMissing, TransferTooLarge, unpack
from rlkit.sandbox.spec import Layers
from tests.limits import HANG_S

from .conftest import left, spec

Playing = Callable[..., None]


def test_a_command_runs_as_a_user_in_a_folder_with_variables(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        done = await sandbox.run("id -u; pwd; echo $WORD; exit 3", user="0", cwd="/usr", env={"WORD": "a b"})
        assert (done.exit_code, done.stdout, done.stderr) == (3, b"0\n/usr\na b\n", b"")
        assert (await sandbox.run(["echo", "$HOME", "x y"])).stdout == b"$HOME x y\n"
        assert (await sandbox.run("kill -9 $$")).exit_code == 137

    playing(play)


def test_an_unstartable_command_exits_with_126_and_a_reason(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        for options in ({"cwd": "/nowhere"}, {"user": "nobody-at-all"}):
            done = await sandbox.run("true", **options)
            assert done.exit_code == 126
            assert next(iter(options.values())).encode() in done.stderr
        assert b"no-such-program" in (await sandbox.run(["no-such-program"])).stderr

    playing(play)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has more than one user in a sandbox")
def test_another_user_has_its_own_ids_and_no_capability(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        done = await sandbox.run("id -u; id -g; grep CapEff /proc/self/status; touch /etc/x", user="nobody")
        assert done.stdout.split() == [b"65534", b"65534", b"CapEff:", b"0" * 16]
        assert b"Permission denied" in done.stderr
        assert (await sandbox.run("id -u; id -g", user="1234:77")).stdout.split() == [b"1234", b"77"]

    playing(play)


def test_output_beyond_its_limit_is_cut_without_blocking(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        done = await sandbox.run("head -c 3000000 /dev/zero; echo end >&2", output_bytes=1000)
        assert (len(done.stdout), done.stderr, done.truncated) == (1000, b"end\n", True)
        await sandbox.run("yes & echo started")  # which never ends

    playing(play)


def test_output_is_streamed(playing: Playing) -> None:
    heard: list[tuple[bytes, str]] = []

    async def hear(data: bytes, stream: str) -> None:
        heard.append((data, stream))

    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("echo one; sleep 0.2; echo two >&2", on_output=hear)

    playing(play)
    assert heard == [(b"one\n", "stdout"), (b"two\n", "stderr")]


def test_a_command_that_times_out_is_killed_with_its_descendants_but_not_daemons(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("setsid -f sleep 301")
        with pytest.raises(CommandTimeout):
            await sandbox.run("sleep 302 & (setsid sleep 303) & bash -c 'sleep 304; true'", timeout_s=0.3)
        alive = "sleep 302"
        while any(f"sleep {number}" in alive for number in (302, 303, 304)):
            alive = (await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout.decode()
        assert "sleep 301" in alive

    playing(play)


def test_a_cancelled_command_is_killed(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        task = asyncio.ensure_future(sandbox.run("exec sleep 305"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while b"305" in (await sandbox.run("cat /proc/[0-9]*/cmdline")).stdout:
            await asyncio.sleep(0.05)

    playing(play)


def test_a_daemon_lives_between_commands(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        if (await sandbox.run("command -v tmux")).exit_code:
            pytest.skip("there is no tmux here")
        assert (await sandbox.run("tmux new-session -d -s work -x 80 -y 24")).exit_code == 0
        await sandbox.run(["tmux", "send-keys", "-t", "work", "echo $((40+2))", "Enter"])
        while b"\n42" not in (await sandbox.run("tmux capture-pane -p -t work")).stdout:
            await asyncio.sleep(0.05)

    playing(play)


def test_many_commands_run_at_once(playing: Playing) -> None:
    count = 20
    meets = f"touch /tmp/$N; until [ $(ls /tmp | wc -l) -ge {count} ]; do sleep 0.05; done"

    async def play(sandbox: Sandbox) -> None:
        done = await asyncio.gather(*(sandbox.run(f"N=here-{number}; {meets}") for number in range(count)))
        assert {result.exit_code for result in done} == {0}

    playing(play)


def test_files_go_in_and_come_out(playing: Playing, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep" / "empty").mkdir(parents=True)
    (tree / "run.sh").write_text("echo ran")
    (tree / "run.sh").chmod(0o755)
    (tree / "deep" / "bytes").write_bytes(bytes(range(256)) * 1000)
    (tree / "link").symlink_to("deep/bytes")
    (tree / "deep" / "second").hardlink_to(tree / "deep" / "bytes")

    async def play(sandbox: Sandbox) -> None:
        await sandbox.put(tree, "/new/place")
        assert (await sandbox.run("stat -c '%a %u' /new/place/run.sh")).stdout == b"755 0\n"
        await sandbox.put(tree / "run.sh", "/other/name.sh")
        await sandbox.put(tree / "run.sh", "/other")
        assert (await sandbox.run("cat /other/name.sh /other/run.sh")).stdout == b"echo ranecho ran"
        await sandbox.get("/new/place", tmp_path / "back", folder=True)
        await sandbox.get("/other/name.sh", tmp_path / "one" / "file", folder=False)

    playing(play)
    assert (tmp_path / "back/deep/bytes").read_bytes() == (tree / "deep/bytes").read_bytes()
    assert (tmp_path / "back/deep/second").read_bytes() == (tree / "deep/bytes").read_bytes()
    assert (tmp_path / "back/deep/empty").is_dir()
    assert (tmp_path / "back/link").readlink() == Path("deep/bytes")
    assert (tmp_path / "one/file").read_text() == "echo ran"


def test_a_copy_reads_its_archive_to_the_end(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for number in range(19):  # the first of the two empty blocks at the end is then the last of a record
            member = tarfile.TarInfo(str(number))
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
    stream.seek(0)
    unpack(stream, tmp_path, single=False, max_bytes=0)
    assert stream.read() == b""
    assert len(list(tmp_path.iterdir())) == 19


def test_a_missing_file_cannot_be_copied(playing: Playing, tmp_path: Path) -> None:
    async def play(sandbox: Sandbox) -> None:
        with pytest.raises(UsageError, match="nowhere"):
            await sandbox.put(tmp_path / "nowhere", "/x")
        with pytest.raises(SourceMissing, match="/nowhere does not exist"):
            await sandbox.get("/nowhere", tmp_path / "x", folder=True)
        with pytest.raises(EnvironmentFault, match="/etc is a folder") as fault:
            await sandbox.get("/etc", tmp_path / "x", folder=False)
        assert not isinstance(fault.value, SourceMissing)
        with pytest.raises(UsageError, match="absolute"):
            await sandbox.get("relative", tmp_path / "x", folder=False)

    playing(play)


def test_a_bound_folder_is_shared_with_the_host(cache: Path, can_sandbox: None, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("given")

    async def main() -> None:
        base_spec = spec()
        binds = (
            Bind(source=str(tmp_path), target="/shared", read_only=False),
            Bind(source=str(tmp_path / "given"), target="/only"),
        )
        sandbox = await Sandbox.start(Spec(trees=base_spec.trees, binds=binds))
        try:
            assert (await sandbox.run("cat /only; echo x > /only")).stdout == b"given"
            assert (await sandbox.run("cp /shared/given /shared/taken")).exit_code == 0
        finally:
            await sandbox.stop()

    asyncio.run(main())
    assert (tmp_path / "taken").read_text() == (tmp_path / "given").read_text() == "given"


def test_ctrl_c_in_the_owners_terminal_does_not_reach_a_sandbox(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        for pid in (sandbox._process.pid, *children(sandbox._process.pid)):
            assert os.getpgid(pid) != os.getpgrp()
            assert os.getsid(pid) != os.getsid(0)

    playing(play)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_stopped_sandbox_runs_no_commands(cache: Path, can_sandbox: None) -> None:
    async def main() -> None:
        sandbox = await Sandbox.start(spec())
        running = asyncio.ensure_future(sandbox.run("sleep 306"))
        await asyncio.sleep(0.1)
        await sandbox.stop()
        await sandbox.stop()
        with pytest.raises(EnvironmentFault, match="ended"):
            await running
        with pytest.raises(EnvironmentFault, match="ended"):
            await sandbox.run("true")

    asyncio.run(main())


def test_a_sandbox_describes_its_limits(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        descriptions = ", ".join(sandbox.limit_descriptions)
        for what in ("memory", "processes", "processor seconds", "per file", "system calls"):
            assert what in descriptions

    playing(play, limits=Limits(cpus=1))


def test_the_error_on_other_systems_than_linux_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(MissingError, match="needs Linux: use a container engine"):
        asyncio.run(Sandbox.start(Spec(trees=(Layers(target="/", lower=("/nowhere",)),))))


def test_a_missing_root_is_an_error_and_leaves_nothing(cache: Path, can_sandbox: None) -> None:
    with pytest.raises((EnvironmentFault, MissingError)):
        asyncio.run(Sandbox.start(Spec(trees=(Layers(target="/", lower=("/nowhere",)),))))
    with pytest.raises(UsageError, match="comma"):
        asyncio.run(Sandbox.start(Spec(trees=(Layers(target="/", lower=("/a,b",)),))))


def test_a_copy_out_of_the_sandbox_is_limited_in_size(playing: Playing, tmp_path: Path) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("mkdir /out; truncate -s 100G /out/sparse")
        with pytest.raises(TransferTooLarge, match="more than 1000 bytes"):
            await sandbox.get("/out", tmp_path / "out", folder=True, max_bytes=1000)
        assert (await sandbox.run("echo alive")).stdout == b"alive\n"

    playing(play, limits=Limits(file_bytes=1 << 40))


def test_no_descriptor_is_left_open_on_either_side(cache: Path, can_sandbox: None) -> None:
    async def main() -> None:
        sandbox = await Sandbox.start(spec())
        try:
            descriptors = (await sandbox.run("ls /proc/self/fd")).stdout.split()
            assert descriptors == [b"0", b"1", b"2", b"3"]  # the last one is the folder that is listed
            await sandbox.run("sleep 60 & yes & true")
            with pytest.raises(CommandTimeout):
                await sandbox.run("sleep 60", timeout_s=0.1)
            await sandbox.run(["no-such-program"])
        finally:
            await sandbox.stop()

    asyncio.run(main())
    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(main())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_start_cancelled_at_any_moment_leaves_nothing(cache: Path, can_sandbox: None) -> None:
    async def main() -> None:
        for wait_s in (0, 0.002, 0.01, 0.03, 0.06):
            task = asyncio.ensure_future(Sandbox.start(spec()))
            await asyncio.sleep(wait_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).stop()

    asyncio.run(main())
    assert left(cache) == []


def test_all_processes_are_killed_even_at_the_limit_on_processes(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        await sandbox.run("for _ in $(seq 40); do setsid -f sleep 307; done", timeout_s=HANG_S)
        waiting = asyncio.create_task(sandbox.run("sleep 307"))
        await asyncio.sleep(0.1)
        await sandbox.kill_processes()
        assert (await waiting).exit_code in {126, 137}  # at the limit, it does not start
        assert (
            len((await sandbox.run("echo /proc/[0-9]*/stat")).stdout.split()) == 2
        )  # the first process, and the shell

    playing(play, limits=Limits(processes=16))
