"""Attacks by a model's program and the layers that stop them; results of honest programs."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rlkit.errors import EnvironmentFault, MissingError
from rlkit.sandbox.inside import landlock, program_filter
from rlkit.sandbox.runners.fork_server import ForkServer
from rlkit.sandbox.runners.programs import LAYERS, Isolation, Layer, Program, ProgramLimits, ProgramResult
from rlkit.sandbox.spec import MIB
from tests.limits import HANG_S, wait_until

LIMITS = ProgramLimits(timeout_s=60, memory_bytes=512 * MIB, result_bytes=MIB)
SHORT = ProgramLimits(timeout_s=2.0, memory_bytes=512 * MIB, result_bytes=MIB)
BARE: tuple[Layer, ...] = ("environment", "session")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's"),
    pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock"),
    pytest.mark.skipif(program_filter.program() is None, reason="there is no filter for this processor"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """With all layers, as by default."""
    fork_server = ForkServer(workers=2, preload=["numpy"])
    yield fork_server
    fork_server.close()


def run_source(server: ForkServer, source: str, limits: ProgramLimits = LIMITS, **arguments: float) -> ProgramResult:
    return asyncio.run(server.run(Program(source, arguments=arguments), limits))


def test_the_default_isolation_is_by_the_kernel_and_lists_its_layers(server: ForkServer) -> None:
    isolation = server.start()
    assert isolation.level == "os"
    assert {"landlock", "seccomp", "no_new_privs", "capabilities", "limits"} <= set(isolation.layers)
    assert f"landlock (version {landlock.version()})" in str(isolation)


def test_arrays_are_returned_bit_for_bit_in_their_shape(server: ForkServer) -> None:
    numbers = np.random.default_rng(0).normal(size=(3, 5))
    program = Program("def run():\n    return numbers * 1", arrays={"numbers": numbers})
    result = asyncio.run(server.run(program, LIMITS))
    assert result.outcome == "value"
    assert result.value is not None
    np.testing.assert_array_equal(result.value, numbers)
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("def run(seed): return [seed, 2]", [7.0, 2.0]),
        ("def run(budget_s, seed=3): return seed + budget_s", 8.5),
        ("def run(**given): return sorted(given.values())", [1.5, 7.0]),
        ("run = lambda: (3.0, 'what it claims')", 3.0),
        ("def run(): return True", 1.0),
        ("import numpy as np\ndef run(): return np.float32([0.5, float('nan')])", [0.5, float("nan")]),
    ],
)
def test_an_entry_gets_the_arguments_that_it_names_and_returns_numbers(
    server: ForkServer, source: str, value: float | Sequence[float]
) -> None:
    result = run_source(server, source, seed=7, budget_s=1.5)
    assert result.value is not None, result.error
    np.testing.assert_array_equal(result.value, np.array(value, np.float64))


@pytest.mark.parametrize(
    ("source", "outcome", "error"),
    [
        ("def run(: pass", "error", "SyntaxError: invalid syntax"),
        ("def run(): return 1 / 0", "error", "line 1, in run\n    def run(): return 1 / 0"),
        ("def other(): return 1", "error", "NameError: the program defines no function run"),
        ("def run(): return 'text'", "error", "TypeError: run returned an array of <U4"),
        ("def run(): return object()", "error", "TypeError"),
        ("def run(): return [[1], [2, 3]]", "error", "ValueError"),
        ("def run(): return 1j", "error", "TypeError"),
        ("import sys\ndef run(): sys.exit(3)", "error", "sys.exit(3)"),
        ("import os\ndef run(): os._exit(3)", "killed", "code 3 and without a result"),
        ("import os\ndef run(): os.abort()", "killed", "signal"),
        ("def run(): return run()", "error", "RecursionError"),
        ("def run(): return bytearray(1 << 40)", "memory", "memory"),
        ("import numpy as np\ndef run(): return np.ones(1 << 18)", "too large", "larger than 1048576 bytes"),
        ("def run():\n    raise BaseException('odd')", "error", "BaseException: odd"),
    ],
)
def test_the_error_of_a_program_is_reported(server: ForkServer, source: str, outcome: str, error: str) -> None:
    result = run_source(server, source)
    assert (result.outcome, result.value) == (outcome, None)
    assert error in result.error


def test_the_end_of_the_output_is_kept_and_is_not_a_result(server: ForkServer) -> None:
    source = "def run():\n    print('first'); print('x' * 3000000); print('[1.0, 2.0]', end='')\n    return 5.0"
    result = run_source(server, source)
    assert result.value is not None
    assert float(result.value) == 5.0
    assert result.stdout.endswith("x\n[1.0, 2.0]")
    assert len(result.stdout) == 500


def test_a_helper_is_a_function_of_the_program(server: ForkServer) -> None:
    program = Program("def run(): return mean([1.0, 2.0])", helpers={"mean": "statistics:fmean"})
    assert asyncio.run(server.run(program, LIMITS)).value == 1.5


def test_a_program_that_times_out_is_killed_and_keeps_its_output(server: ForkServer) -> None:
    result = run_source(server, "import time\ndef run():\n    print('begun')\n    time.sleep(3600)", SHORT)
    assert (result.outcome, result.stdout) == ("timeout", "begun\n")
    assert result.seconds >= SHORT.timeout_s


def test_a_cancelled_program_is_killed(server: ForkServer) -> None:
    async def main() -> None:
        await server.run(Program("def run(): return 1.0"), LIMITS)
        slow = Program("import time\ndef run(): time.sleep(60)")
        long = ProgramLimits(timeout_s=60, memory_bytes=512 * MIB)
        for waiting in [asyncio.create_task(server.run(slow, long)) for _ in range(4)]:
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        async with asyncio.timeout(HANG_S):  # there is room again
            assert (await server.run(Program("def run(): return 1.0"), LIMITS)).value == 1.0

    asyncio.run(main())


def test_processors_of_the_process_limit_concurrent_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHON_CPU_COUNT", "1")  # as in the workers of a run
    server = ForkServer(preload=["numpy"])
    source = "from time import *\ndef run():\n    began = monotonic()\n    sleep(0.1)\n    return [began, monotonic()]"

    async def main() -> list[list[float]]:
        results = await asyncio.gather(*(server.run(Program(source), LIMITS) for _ in range(3)))
        return sorted(result.value.tolist() for result in results if result.value is not None)

    times = asyncio.run(main())
    server.close()
    assert len(times) == 3
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(times))


def test_a_server_that_died_is_restarted() -> None:
    server = ForkServer(workers=1, preload=["numpy"])
    assert run_source(server, "def run(): return 1.0").value == 1.0
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not alive(server.pid))
    assert run_source(server, "def run(): return 2.0").value == 2.0
    server.close()


def test_a_server_that_was_used_serves_a_forked_process_too() -> None:
    script = """
import asyncio, os
from rlkit.sandbox.runners.fork_server import ForkServer
from rlkit.sandbox.runners.programs import Program, ProgramLimits
server = ForkServer(workers=1, preload=["numpy"])
async def check(value):
    async with asyncio.timeout(60):
        assert (await server.run(Program(f"def run(): return {value}"), ProgramLimits())).value == value
asyncio.run(check(1.0))
child = os.fork()
if child == 0:
    asyncio.run(check(2.0))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
asyncio.run(check(3.0))
server.close()
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=HANG_S, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_server_does_not_run_below_the_requested_isolation_level() -> None:
    server = ForkServer(workers=1, preload=["numpy"], layers=("environment", "session", "limits"))
    with pytest.raises(MissingError, match="isolation 'limits', below min_isolation 'os'"):
        run_source(server, "def run(): return 1.0")
    server.close()
    weaker = ForkServer(
        workers=1, preload=["numpy"], layers=("environment", "session", "limits"), min_isolation="limits"
    )
    assert run_source(weaker, "def run(): return 1.0").value == 1.0
    weaker.close()


@pytest.mark.parametrize("lost", [layer for layer in LAYERS if layer != "namespaces"])
def test_the_level_is_lost_with_any_layer_but_namespaces(lost: str) -> None:
    assert Isolation(LAYERS, {}).level == "os"
    assert Isolation(tuple(layer for layer in LAYERS if layer != lost), {}).level != "os"
    assert Isolation(tuple(layer for layer in LAYERS if layer != "namespaces"), {}).level == "os"


def test_all_processes_end_when_the_owner_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "pids"
    script = f"""
import asyncio, pathlib
from rlkit.sandbox.runners.fork_server import ForkServer
from rlkit.sandbox.runners.programs import Program, ProgramLimits
async def main():
    server = ForkServer(workers=1, preload=["numpy"])
    server.start()
    running = asyncio.create_task(server.run(Program("while True: pass"), ProgramLimits()))
    await asyncio.sleep(0.5)
    pathlib.Path({str(mark)!r}).write_text(str(server.pid))
    await running
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", script])
    while not (mark.exists() and mark.read_text()):
        assert owner.poll() is None
        time.sleep(0.05)
    server = int(mark.read_text())
    wait_until(lambda: len(family(server)) >= 3)  # the server, a keeper, a program
    started = family(server)
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(alive(pid) for pid in started))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def family(leader: int) -> set[int]:
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    pids = {leader}
    while more := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids


@dataclass(frozen=True)
class Attack:
    """A program that returns 1 if it got what it wanted.

    Args:
        source: of it.
        stopped_by: the layers each of which refuses it, where it is the only one beside those that need no privilege.
    """

    source: str
    stopped_by: tuple[Layer, ...]


ATTACKS = {
    "read the environment of the trainer": Attack(
        "def run():\n    return b'SESAME' in open('/proc/{trainer}/environ', 'rb').read()", ("namespaces", "landlock")
    ),
    "read its own environment": Attack(
        "import os\ndef run():\n    return 'SESAME' in str(os.environ)", ("environment",)
    ),
    "read the environment that it was started with": Attack(
        "def run():\n    return b'SESAME' in open('/proc/self/environ', 'rb').read()",
        ("environment", "namespaces", "landlock"),
    ),
    "read password hashes": Attack("def run():\n    return len(open('/etc/shadow').read()) > 0", ("landlock",)),
    "list a home": Attack("import os\ndef run():\n    return len(os.listdir('/root')) >= 0", ("landlock",)),
    "write a file": Attack(
        "def run():\n    with open('{folder}/mark', 'w') as file:\n        file.write('x')\n    return 1",
        ("limits", "landlock"),
    ),
    "make a folder": Attack("import os\ndef run():\n    os.mkdir('{folder}/made')\n    return 1", ("landlock",)),
    "remove a file": Attack("import os\ndef run():\n    os.remove('{folder}/victim')\n    return 1", ("landlock",)),
    "change who may read a file": Attack(
        "import os\ndef run():\n    os.chmod('{folder}/victim', 0o777)\n    return 1", ("seccomp",)
    ),
    "give a file away": Attack(
        "import os\ndef run():\n    os.chown('{folder}/victim', os.getuid(), os.getgid())\n    return 1", ("seccomp",)
    ),
    "change a file's age": Attack(
        "import os\ndef run():\n    os.utime('{folder}/victim', (1, 1))\n    return 1", ("seccomp",)
    ),
    "write beside a file's content": Attack(
        "import os\ndef run():\n    os.setxattr('{folder}/victim', 'user.mark', b'1')\n    return 1", ("seccomp",)
    ),
    "watch a folder": Attack(
        "import ctypes\ndef run():\n    return ctypes.CDLL(None).inotify_init1(0) >= 0", ("seccomp",)
    ),
    "fill the disk": Attack(
        "def run():\n    with open('{folder}/bomb', 'wb') as file:\n        file.write(bytes(1 << 20))\n    return 1",
        ("limits", "landlock"),
    ),
    "fill memory through a file without a name": Attack(
        "import os\ndef run():\n    return os.write(os.memfd_create('x'), b'x' * 4096)", ("limits", "seccomp")
    ),
    "fill memory": Attack("def run():\n    return len(bytearray(3 << 30)) > 0", ("limits",)),
    "connect to a server": Attack(
        "import socket\ndef run():\n    socket.create_connection(('127.0.0.1', {port}), timeout=1)\n    return 1",
        ("namespaces", "landlock", "seccomp"),
    ),
    "send a datagram": Attack(
        "import socket\ndef run():\n"
        "    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))\n    return 1",
        ("namespaces", "seccomp"),
    ),
    "run a shell": Attack(
        "import subprocess\ndef run():\n    return subprocess.run(['/bin/sh', '-c', 'true']).returncode == 0",
        ("landlock", "seccomp"),
    ),
    "become another program": Attack(
        "import os\ndef run():\n    os.execv('/bin/true', ['true'])", ("landlock", "seccomp")
    ),
    "start processes": Attack(
        "import os\ndef run():\n    if os.fork() == 0:\n        os._exit(0)\n    return 1", ("seccomp",)
    ),
    "kill the trainer": Attack(
        "import os\ndef run():\n    os.kill({trainer}, 0)\n    return 1", ("namespaces", "seccomp")
    ),
    "kill whatever it may": Attack(
        "import os, signal\ndef run():\n    os.kill({victim}, signal.SIGKILL)\n    return 1", ("namespaces", "seccomp")
    ),
    "have a pipe kill": Attack(
        "import fcntl, os\ndef run():\n    reader, writer = os.pipe()\n    fcntl.fcntl(reader, 8, {victim})\n"
        "    fcntl.fcntl(reader, 10, 9)\n    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)\n    return 1",
        ("seccomp",),
    ),
    "slow another process": Attack(
        "import os\ndef run():\n    os.setpriority(os.PRIO_PROCESS, {victim}, 19)\n    return 1",
        ("namespaces", "seccomp"),
    ),
    "slow all processes": Attack(
        "import os\ndef run():\n    os.setpriority(os.PRIO_USER, os.getuid(), 19)\n    return 1", ("seccomp",)
    ),
    "bind another process to a processor": Attack(
        "import os\ndef run():\n    os.sched_setaffinity({victim}, os.sched_getaffinity(0))\n    return 1",
        ("namespaces", "seccomp"),
    ),
    "ask a file system for more than a file": Attack(
        "import fcntl, os\ndef run():\n    return fcntl.ioctl(os.open(os.__file__, 0), 0x80086601, bytes(8)) != b''",
        ("seccomp",),
    ),
    "look into another process": Attack(
        "import ctypes\ndef run():\n    return ctypes.CDLL(None).ptrace(16, {victim}, 0, 0) == 0",
        ("namespaces", "landlock", "seccomp"),
    ),
    "leave something in shared memory": Attack(
        "import ctypes\ndef run():\n    return ctypes.CDLL(None).shmget(0, 4096, 0o1600) >= 0", ("seccomp",)
    ),
    "take new privileges": Attack(
        "import ctypes\ndef run():\n    return ctypes.CDLL(None).unshare(0x10000000) == 0", ("seccomp",)
    ),
    "outlive its keeper": Attack(
        "import ctypes\ndef run():\n    return ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0", ("seccomp",)
    ),
}


@pytest.fixture
def victim() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def prepared(attack: Attack, folder: Path, victim: int, listening: int) -> str:
    (folder / "victim").write_text("x")
    source = attack.source
    for name, value in (("trainer", os.getpid()), ("folder", folder), ("victim", victim), ("port", listening)):
        source = source.replace(f"{{{name}}}", str(value))
    return source


@pytest.mark.parametrize("name", ATTACKS)
def test_by_default_an_attack_gets_nothing(
    name: str, server: ForkServer, tmp_path: Path, victim: int, listening: int
) -> None:
    source = prepared(ATTACKS[name], tmp_path, victim, listening)
    before = (tmp_path / "victim").stat()
    result = run_source(server, source)
    assert result.value is None or not result.value.any(), result.value
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    after = (tmp_path / "victim").stat()
    assert (after.st_mode, after.st_mtime, after.st_ctime) == (before.st_mode, before.st_mtime, before.st_ctime)
    os.kill(victim, 0)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ForkServer]]:
    """Map each layer to a server with this layer and as few others as it needs."""
    server_by_layer = dict[str, ForkServer]()
    for layer in LAYERS:
        needed: tuple[Layer, ...] = ("no_new_privs",) if layer in ("landlock", "seccomp") else ()
        server_by_layer[layer] = ForkServer(workers=1, preload=["numpy"], layers=(*needed, layer), min_isolation="none")
    yield server_by_layer
    for server in server_by_layer.values():
        server.close()


@pytest.mark.parametrize(("name", "layer"), [(name, layer) for name in ATTACKS for layer in ATTACKS[name].stopped_by])
def test_each_named_layer_stops_the_attack_alone(
    name: str,
    layer: Layer,
    servers: dict[str, ForkServer],
    tmp_path: Path,
    victim: int,
    listening: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SESAME", "SESAME")
    server = servers[layer]
    if layer not in server.start().layers:
        pytest.skip(f"this machine has no {layer}")
    result = run_source(server, prepared(ATTACKS[name], tmp_path, victim, listening))
    assert result.value is None or not result.value.any(), result.value
    assert (tmp_path / "victim").exists()
    os.kill(victim, 0)


def test_a_fork_bomb_and_a_daemon_end_with_their_namespaced_program() -> None:
    layers: tuple[Layer, ...] = ("environment", "session", "namespaces")
    server = ForkServer(workers=1, preload=["numpy"], layers=layers, min_isolation="none")
    if "namespaces" not in server.start().layers:
        pytest.skip("this machine has no namespaces")
    assert server.pid is not None
    source = """
import os, time
def run():
    for _ in range(20):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
    time.sleep(60)
"""
    result = run_source(server, source, SHORT)
    assert result.outcome == "timeout"
    wait_until(lambda: len(family(server.pid)) <= 2)  # the server, and the one that waits for it
    server.close()


@pytest.mark.parametrize("then", ["time.sleep(60)", "\n            while True: os.write(1, b'x' * 4096)"])
def test_a_daemon_that_survives_limits_does_not_delay_the_result(then: str) -> None:
    layers: tuple[Layer, ...] = ("environment", "session", "limits")
    server = ForkServer(workers=1, preload=["numpy"], layers=layers, min_isolation="limits")
    source = f"""
import os, signal, time
def run():
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.write(writer, str(os.getpid()).encode())
            {then}
        os._exit(0)
    return float(os.read(reader, 20))
"""
    result = run_source(server, source)
    assert result.value is not None, result.error
    try:
        os.kill(int(result.value), signal.SIGKILL)
    except ProcessLookupError:
        assert "write" in then  # nobody reads any more
    server.close()


def test_a_program_cannot_read_published_constructions(server: ForkServer) -> None:
    from rlkit.envs.discovery.problem import PUBLISHED

    path = PUBLISHED / "erdos_ttt_discover_2026.json"
    assert path.is_file()
    assert "Permission denied" in run_source(server, f"def run(): return len(open({str(path)!r}).read())").error


def test_a_package_is_excluded_from_its_folder(tmp_path: Path) -> None:
    from rlkit.sandbox.inside.server import _list_without  # pyright: ignore[reportPrivateUsage]

    for name in ("numpy/core.py", "deep/rlkit/secret.json", "deep/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    paths = {
        str(Path(path).relative_to(tmp_path)) for path in _list_without(str(tmp_path), str(tmp_path / "deep" / "rlkit"))
    }
    assert paths == {"numpy", "deep/other.py"}


def test_a_library_that_was_not_preloaded_can_be_imported(server: ForkServer) -> None:
    assert run_source(server, "import colorsys, yaml\ndef run(): return colorsys.rgb_to_hsv(1, 0, 0)[1]").value == 1.0


FORGERIES = {
    "a result on its output": "import sys\ndef run():\n    print('[[0.1, 0.1, 9.0]]')\n    raise ValueError",
    "a changed numpy": "import numpy as np\nnp.asarray = lambda *a, **k: 1 / 0\ndef run(): return 1.0",
    "a pickle in the place of a result": (
        "import os, pickle\ndef run():\n    os.write(3, pickle.dumps(print))\n    os._exit(0)"
    ),
    "an endless header": (
        "import os\ndef run():\n    os.write(3, b'RLK1' + bytes([0, 4, 0, 0]) + b'\\xff' * 32)\n    os._exit(0)"
    ),
    "no numbers in an impossible shape": (
        "import os, struct\ndef run():\n"
        "    os.write(3, b'RLK1' + bytes([0, 4, 0, 0]) + struct.pack('<4Q', 0, *[2**63] * 3))\n    os._exit(0)"
    ),
    "two results": (
        "import os, struct\ndef run():\n"
        "    os.write(3, b'RLK1' + bytes([0, 1, 0, 0]) + struct.pack('<4Qd', 1, 0, 0, 0, 4.5))\n    return 5.0"
    ),
    "a kind that there is not": (
        "import os\ndef run():\n    os.write(3, b'RLK1' + bytes([7] + [0] * 35))\n    os._exit(0)"
    ),
    "a fault of the sandbox": (
        "import os\ndef run():\n    os.write(3, b'RLK1' + bytes([3]) + bytes(35) + b'no room')\n    os._exit(1)"
    ),
    "half a result": "import os\ndef run():\n    os.write(3, b'RLK1')\n    os._exit(0)",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_result_gives_no_value(name: str, server: ForkServer) -> None:
    assert run_source(server, FORGERIES[name]).value is None


def test_a_result_written_by_hand_is_only_numbers(server: ForkServer) -> None:
    """The verifier reads these numbers and nothing else, so that nothing is gained by it."""
    source = (
        "import os, struct\ndef run():\n"
        "    os.write(3, b'RLK1' + bytes([0, 1, 0, 0]) + struct.pack('<4Qd', 1, 0, 0, 0, 4.5))\n    os._exit(0)"
    )
    result = run_source(server, source)
    assert result.value is not None
    assert result.value.tolist() == [4.5]


def test_a_program_cannot_change_numpy_for_the_next(server: ForkServer) -> None:
    run_source(server, FORGERIES["a changed numpy"])
    assert run_source(server, "import numpy as np\ndef run(): return np.asarray([2.0])").value == [2.0]


def test_layers_that_cannot_be_set_up_fail_the_episode_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit.sandbox.runners import fork_server

    server = ForkServer(workers=1, preload=["numpy"])
    monkeypatch.setattr(fork_server, "_START", "raise SystemExit(3)")
    with pytest.raises(EnvironmentFault, match="does not start"):
        run_source(server, "def run(): return 1.0")
    server.close()
