"""A program of a sandbox without a network reaches one port of the host, as hostile as it may be."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlkit.errors import EnvironmentFault
from rlkit.sandbox import Sandbox
from rlkit.sandbox.forwarder import CONNECTIONS_MAX
from tests.limits import HANG_S

from .conftest import spec

Playing = Callable[..., None]

ASK = """
import json, socket, sys
replies = []
for port in map(int, sys.argv[1:]):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"hello")
            connection.shutdown(socket.SHUT_WR)
            replies.append(connection.makefile().read())
    except OSError as error:
        replies.append(type(error).__name__)
print(json.dumps(replies))
"""

FLOOD = f"""
import socket, sys, time
held = []
for number in range({3 * CONNECTIONS_MAX}):
    connection = socket.socket()
    connection.settimeout(0.02)
    try:
        connection.connect(("127.0.0.1", int(sys.argv[1])))
        connection.send(b"h")
    except OSError:
        pass
    held.append(connection)
print("flooded", flush=True)
time.sleep(100)
"""


@asynccontextmanager
async def serve(name: str) -> AsyncGenerator[int]:
    """Serve a port of the host that repeats what it gets, after a name."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        content = await reader.read()
        writer.write(f"{name}: ".encode() + content)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def ask(sandbox: Sandbox, *ports: int) -> list[str]:
    command = ["python3", "-c", ASK, *map(str, ports)]
    replies: list[str] = json.loads((await sandbox.run(command, timeout_s=HANG_S)).stdout)
    return replies


def test_only_the_forwarded_port_of_the_host_is_reached_and_only_in_the_block(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        async with serve("endpoint") as port, serve("other") as other:
            async with sandbox.forward_port(port):
                assert await ask(sandbox, port, other) == ["endpoint: hello", "ConnectionRefusedError"]
            assert await ask(sandbox, port) == ["ConnectionRefusedError"]
            async with sandbox.forward_port(port):  # as for the next step of a task
                assert await ask(sandbox, port) == ["endpoint: hello"]

    playing(play)


def test_large_contents_pass_in_both_directions(playing: Playing) -> None:
    program = """
import socket, sys, threading
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
threading.Thread(target=lambda: (connection.sendall(b"x" * 9_000_000), connection.shutdown(socket.SHUT_WR))).start()
print(len(connection.makefile().read()))
"""

    async def play(sandbox: Sandbox) -> None:
        async with serve("big") as port, sandbox.forward_port(port):
            assert (await sandbox.run(["python3", "-c", program, str(port)], timeout_s=HANG_S)).stdout == b"9000005\n"

    playing(play)


@pytest.mark.parametrize(("descriptors", "connections"), [(1 << 20, CONNECTIONS_MAX), (64, 4), (8, 2)])
def test_a_sandbox_that_floods_its_port_delays_neither_the_run_nor_another_sandbox(
    descriptors: int, connections: int, playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (descriptors, descriptors))

    async def play(sandbox: Sandbox) -> None:
        other = await Sandbox.start(spec())
        flooded = asyncio.Event()

        async def note(data: bytes, stream: str) -> None:
            flooded.set()

        try:
            async with serve("endpoint") as port, sandbox.forward_port(port), other.forward_port(port):
                before = len(list(Path("/proc/self/fd").iterdir()))
                flood = asyncio.create_task(sandbox.run(["python3", "-c", FLOOD, str(port)], on_output=note))
                await asyncio.wait_for(flooded.wait(), HANG_S)
                assert len(list(Path("/proc/self/fd").iterdir())) <= before + 3 * connections + 10
                assert await ask(other, port) == ["endpoint: hello"]
                flood.cancel()
                await asyncio.wait([flood])
                assert await ask(sandbox, port) == ["endpoint: hello"]  # it has its slots back
        finally:
            await other.stop()

    playing(play)


def test_a_stopped_sandbox_ends_its_connections(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        connect = "import socket, sys, time; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
        client = f"{connect}; time.sleep(99)"  # otherwise it might end by itself before it is killed
        connected, ended = asyncio.Event(), asyncio.Event()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected.set()
            await reader.read()
            ended.set()
            writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, sandbox.forward_port(port):
            waiting = asyncio.create_task(sandbox.run(["python3", "-c", client, str(port)]))
            await asyncio.wait_for(connected.wait(), HANG_S)
            await sandbox.stop()
            await asyncio.wait_for(ended.wait(), HANG_S)
            with pytest.raises(EnvironmentFault):
                await waiting

    playing(play)


def test_a_port_that_the_sandbox_uses_itself_is_a_fault(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        listen = "import socket, time; s = socket.create_server(('127.0.0.1', 4321)); print(flush=True); time.sleep(99)"
        listening = asyncio.Event()

        async def note(data: bytes, stream: str) -> None:
            listening.set()

        server = asyncio.create_task(sandbox.run(["python3", "-c", listen], on_output=note))
        await asyncio.wait_for(listening.wait(), HANG_S)
        with pytest.raises(EnvironmentFault, match="4321: Address already in use"):
            async with sandbox.forward_port(4321):
                pass
        server.cancel()

    playing(play)


def test_a_sandbox_with_the_hosts_network_needs_no_forwarder(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        async with serve("endpoint") as port, sandbox.forward_port(port):
            assert await ask(sandbox, port) == ["endpoint: hello"]

    playing(play, network=True)


def test_a_host_without_a_server_refuses(playing: Playing) -> None:
    async def play(sandbox: Sandbox) -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        async with sandbox.forward_port(port):
            assert await ask(sandbox, port) in (["ConnectionResetError"], ["OSError"], [""])  # as the system times it

    playing(play)
