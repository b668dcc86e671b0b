"""Services that cannot be reached, with real sockets: one line with the address and the reason, in a limited time."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from rlkit.config.schema import ServiceConfig
from rlkit.errors import ConfigError, MissingError
from rlkit.testing import run_virtual
from rlkit.tinker_client.connect import connect
from rlkit.tinker_client.connector import Connector, Unreachable, public_address
from tests.addresses import closed_port, status_server
from tests.simulation import Word

SECRET = "s3cret-canary"


def connection_error(url: str, *, connect_timeout_s: float = 3.0) -> tuple[str, list[str]]:
    """The error of a connection, and what the user was told while it was tried."""
    notes = list[str]()

    async def run() -> None:
        config = ServiceConfig(base_url=url, connect_timeout_s=connect_timeout_s)
        async with connect(config, note=notes.append):
            raise AssertionError("there is nothing to connect to")

    with pytest.raises(MissingError) as raised:
        asyncio.run(run())
    return str(raised.value), notes


def assert_one_line(error: str, notes: list[str], address: str, reason: str) -> None:
    assert error == (
        f"the service at {address} (service.base_url is set) cannot be reached: {reason}; gave up after 3 s "
        "(service.connect_timeout_s)"
    )
    assert len(notes) == 1
    assert notes[0].startswith(f"waiting up to 3 s for the service at {address}: ")


def test_refused_connection_is_one_line_without_the_password() -> None:
    address = f"127.0.0.1:{closed_port()}/prefix"
    error, notes = connection_error(f"http://user:{SECRET}@{address}?token={SECRET}")
    assert_one_line(error, notes, f"http://{address}", "connection refused")


def test_silent_server_is_an_error_of_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        error, notes = connection_error(address)
    assert f"{address} (service.base_url is set) cannot be reached: it accepts connections, but sent no answer" in error
    assert notes == [f"waiting up to 3 s for the service at {address}: no answer yet"]


def test_tls_failure_is_an_error_of_one_line() -> None:
    with status_server(200) as address:  # which speaks no TLS
        error, notes = connection_error(f"https://{address}")
    assert_one_line(error, notes, f"https://{address}", "TLS: WRONG_VERSION_NUMBER")


def test_unresolvable_name_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_resolver(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fake_resolver)
    error, notes = connection_error("http://service.invalid")
    reason = "its name cannot be resolved (Temporary failure in name resolution)"
    assert_one_line(error, notes, "http://service.invalid", reason)


def test_gateway_error_is_one_line_with_the_request_id() -> None:
    with status_server(503) as address:
        error, notes = connection_error(f"http://{address}")
    assert_one_line(error, notes, f"http://{address}", "it answered 503 (request req-7)")


@pytest.mark.parametrize("url", ["not a url", "ftp://127.0.0.1", "http://[::1"])
def test_malformed_address_is_a_usage_error(url: str) -> None:
    async def run() -> None:
        async with connect(ServiceConfig(base_url=url)):
            pass

    with pytest.raises(ConfigError, match=r"service\.base_url .* is not a valid URL of a service"):
        asyncio.run(run())


@pytest.mark.parametrize("status", [200, 401, 404, 501])
def test_service_that_recovers_in_time_is_awaited(status: int) -> None:
    notes = list[str]()
    with status_server(502, 503, status) as address:
        connector = Connector(f"http://{address}", "it was given", 600, notes.append)
        asyncio.run(connector.wait_for_answer())
    assert len(notes) == 1


def test_error_has_the_last_reason_if_the_last_attempt_hangs() -> None:
    limits = list[float]()

    async def attempt(limit_s: float) -> None:
        limits.append(limit_s)
        if len(limits) > 1:
            await asyncio.sleep(3600)
        raise Unreachable("the machine starts")

    connector = Connector("http://x", "it was given", 1, lambda _: None)
    with pytest.raises(MissingError, match="fails: the machine starts; gave up after 1 s"):
        run_virtual(connector.retry(attempt, "fails"))
    assert len(limits) == 2


def test_address_is_shown_without_possible_keys() -> None:
    assert public_address(f"https://a:{SECRET}@h.example:8/p/?k={SECRET}#x") == "https://h.example:8/p/"
    assert public_address(f"http://a:{SECRET}@[::1") == "http://[::1"
    assert public_address(f"http://a:{SECRET}/#?@h.example/p") == "http://h.example/p"
    assert public_address(f"a:{SECRET}@h.example") == "h.example"


def test_script_without_a_service_gets_an_exception(byte_model_dir: Path) -> None:
    service = {"base_url": f"http://127.0.0.1:{closed_port()}", "connect_timeout_s": 1.0}
    with pytest.raises(MissingError, match="cannot be reached: connection refused"):
        rlkit.train(model=str(byte_model_dir), envs=[Word(1)], service=service, trackers=[])


SCRIPT = """
import sys
import rlkit

class Env(rlkit.Env):
    async def rollout(self, policy):
        return 0.0

class Notes:
    def on_note(self, message):
        print(message, flush=True)
    def on_start(self, run): ...
    def on_step(self, step, metrics): ...
    def on_checkpoint(self, checkpoint): ...
    def on_finish(self, result): ...

try:
    rlkit.train(model=sys.argv[1], envs=[Env()], service={"base_url": sys.argv[2]}, trackers=[Notes()])
except KeyboardInterrupt:
    print("stopped")
"""


@pytest.mark.slow
def test_first_interrupt_stops_a_preparing_script(byte_model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        command = [sys.executable, "-c", SCRIPT, str(byte_model_dir), url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as script:
            assert script.stdout is not None
            line = ""
            while not line.startswith("waiting up to 60 s"):
                line = script.stdout.readline()
                assert line, "it ended by itself"
            script.send_signal(signal.SIGINT)
            assert script.stdout.read() == "stopped\n"
            assert script.wait() == 0
