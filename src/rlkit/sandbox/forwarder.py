"""Port of a sandbox's own loopback, forwarded to the same port of the host's.

Invariant: connections of the sandbox reach this one port of the host and nothing else, and end with the forwarder. A
client that floods it or stalls delays its own sandbox only.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress

CONNECTIONS_MAX = 16  # number of open connections of a sandbox; further ones wait
_CONNECTIONS_MIN = 2
_DESCRIPTORS_PER_CONNECTION = 8
"""Descriptors of the process for each connection of all sandboxes. It takes three: two here, and one of the server."""

_CHUNK_BYTES = 1 << 16
_PAUSE_S = 0.1


class Forwarder:
    """A port that is forwarded until `close`, from a listening socket in the sandbox's network namespace."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._address = listener.getsockname()
        self._connections = set[asyncio.Task[None]]()
        self._accepting = asyncio.create_task(self._accept())
        _forwarders.add(self)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # the client is gone already, or this process has no descriptor left
                await asyncio.sleep(_PAUSE_S)
                continue
            task = asyncio.create_task(self._forward(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            share = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTORS_PER_CONNECTION // len(_forwarders)
            while len(self._connections) >= max(_CONNECTIONS_MIN, min(CONNECTIONS_MAX, share)):
                await asyncio.wait(self._connections, return_when=asyncio.FIRST_COMPLETED)

    async def _forward(self, connection: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            inner_reader, inner_writer = await asyncio.open_connection(sock=connection)
            writers.append(inner_writer)
            outer_reader, outer_writer = await asyncio.open_connection(*self._address)
            writers.append(outer_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(inner_reader, outer_writer))
                group.create_task(_copy(outer_reader, inner_writer))
        except* OSError:  # an end broke the connection, or nobody listens on the host
            pass
        finally:
            for writer in writers:
                writer.transport.abort()
            connection.close()

    async def close(self) -> None:
        """Stop listening, and end all connections; may be called more than once."""
        _forwarders.discard(self)
        tasks = {self._accepting, *self._connections}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._listener.close()


_forwarders = set[Forwarder]()  # the forwarders of this process, which have equal shares of its descriptors


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy one direction of a connection to its end; a slow receiver slows its sender down."""
    target.transport.set_write_buffer_limits(high=0)  # `drain` then waits for all data, of which closing loses none
    while data := await source.read(_CHUNK_BYTES):
        target.write(data)
        await target.drain()
    with suppress(OSError):
        target.write_eof()
