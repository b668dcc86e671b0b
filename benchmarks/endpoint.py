"""Measure the endpoint of a rollout's policy, and compare it with other proxies on the same work in the same run.

    uv run python benchmarks/endpoint.py
    uv run python benchmarks/endpoint.py --litellm PYTHON --cookbook PYTHON     (interpreters that have the peers)

    requests    CPU of the endpoint's process a request, beyond that of `policy.chat` in this process: 16 conversations
                at once, each of six turns with a tool. A script gives the replies at once
    streams     256 streams at once, while each reply takes two seconds: wall time beyond these, and CPU a stream
    first byte  time from the request to the first byte of a stream, compared with a decoding step of the embedded
                engine, both in one process
    litellm     CPU a request of litellm's proxy, whose provider is a stand-in that answers at once; compared with the
                endpoint and `policy.chat` together
    cookbook    the same for the capture proxy of tinker-cookbook. Both sides use the Tinker SDK, whose service is a
                stand-in that answers at once, and the same renderer and tokenizer

The client is another process, which opens no connection twice. CPU is that of the server's process with all threads.
Values are medians of rounds, in which the contenders take turns. Requests per second depend on the processors of the
machine: the client, the server and the stand-in run at the same time.

Environments for the peers:

    uv venv litellm && uv pip install --python litellm/bin/python 'litellm[proxy]'
    uv venv cookbook && uv pip install --python cookbook/bin/python 'tinker-cookbook>=0.6.1'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import aiohttp
from endpoint_work import QUESTION, TURNS, hold_conversation

START_S = 180.0
GOAL_MS = 2.0
STREAM_S = 2.0
STEPS = 32
PEER_KEY = f"sk-{secrets.token_hex(32)}"
KINDS = {"plain": False, "streamed": True}


class Process:
    """A server in another process."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen

    def read_line(self) -> dict[str, Any]:
        """Return the next line of JSON that the process prints."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"{self.popen.args} has ended"
        return json.loads(line)

    def command(self, line: str) -> dict[str, Any]:
        """Give the process a command and return its answer."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()
        return self.read_line()

    def cpu_s(self) -> float:
        """Return the CPU time of the process: Linux has a clock for each, whose number follows from the process's."""
        return time.clock_gettime((~self.popen.pid << 3) | 2)


@contextmanager
def start(*command: str, log: Path, env: Mapping[str, str], is_peer: bool = False) -> Generator[Process]:
    """Run a server while the block runs, with the variables `env` too; all that a peer prints goes to `log`."""
    with log.open("w") as errors:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=errors if is_peer else subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        )
    try:
        yield Process(popen)
    except BaseException:
        print(log.read_text()[-2000:], file=sys.stderr)
        raise
    finally:
        popen.terminate()
        popen.communicate()


@contextmanager
def start_own(*arguments: str, folder: Path, env: Mapping[str, str] = {}) -> Generator[tuple[Process, dict[str, Any]]]:
    """Run a server of `endpoint_work`, and yield it with its first line."""
    script = str(Path(__file__).with_name("endpoint_work.py"))
    with start(sys.executable, script, *arguments, log=folder / f"{arguments[0]}.log", env=env) as own:
        yield own, own.read_line()


@contextmanager
def start_peer(*command: str, port: int, log: Path, env: Mapping[str, str]) -> Generator[Process]:
    """Run the proxy of a peer, and wait until it listens."""
    with start(*command, log=log, env={"PYTHONPATH": "", **env}, is_peer=True) as peer:
        deadline_s = time.monotonic() + START_S
        while True:
            assert peer.popen.poll() is None, f"{command} has ended"
            assert time.monotonic() < deadline_s, f"{command} does not answer"
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield peer


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Load:
    """Cost of the same requests at a server.

    Args:
        cpu_ms: CPU of the server a request.
        client_ms: CPU of the client a request.
        rate: requests per second.
    """

    cpu_ms: float
    client_ms: float
    rate: float


def load(server: Process, url: str, keys: Sequence[str], *, stream: bool, turns: int = TURNS) -> Load:
    """Hold a conversation for each key, all at once."""

    async def hold_all() -> Load:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            began = server.cpu_s(), time.process_time(), time.perf_counter()
            await asyncio.gather(*(hold_conversation(client, url, key, stream=stream, turns=turns) for key in keys))
            ended = server.cpu_s(), time.process_time(), time.perf_counter()
        cpu_s, client_s, wall_s = (end - begin for begin, end in zip(began, ended, strict=True))
        requests = len(keys) * turns
        return Load(cpu_s / requests * 1e3, client_s / requests * 1e3, requests / wall_s)

    return asyncio.run(hold_all())


def load_endpoint(server: Process, count: int, *, stream: bool, turns: int = TURNS) -> tuple[Load, int | None]:
    """Load the endpoints of `count` rollouts; return the largest number of concurrent requests too."""
    opened = server.command(f"open {count}")
    result = load(server, opened["url"], opened["keys"], stream=stream, turns=turns)
    return result, server.command("close")["peak"]


def measure_chat(server: Process, count: int) -> float:
    """Return the CPU of `policy.chat` a request, in milliseconds."""
    began_s = server.cpu_s()
    server.command(f"chat {count}")
    return (server.cpu_s() - began_s) / (count * TURNS) * 1e3


def show(what: str, value: str, goal: str = "", *, is_met: bool | None = None) -> None:
    print(f"{what:44}{value:36}{goal:12}{'' if is_met is None else 'met' if is_met else 'MISSED'}", flush=True)


def measure_streams(folder: Path, count: int, seconds: float) -> None:
    """Show the cost of concurrent streams."""
    with start_own("endpoint", "scripted", str(seconds), folder=folder) as (server, _):
        load_endpoint(server, min(count, 16), stream=True, turns=1)
        result, peak = load_endpoint(server, count, stream=True, turns=1)
        assert peak == count, f"only {peak} streams were open at once"
        beyond_s = count / result.rate - seconds
        show(f"{count} streams at once, all complete", f"{beyond_s:.2f} s, {result.cpu_ms:.2f} ms of CPU a stream")


def measure_first_byte(folder: Path, model: str, rounds: int) -> None:
    """Show the time to the first byte of a stream."""
    env = {"TINKER_API_KEY": "", "TINKER_BASE_URL": "", "OMP_NUM_THREADS": str(os.cpu_count())}
    with start_own("endpoint", "engine", model, folder=folder, env=env) as (server, _):
        opened = server.command("open 1")
        server.command(f"steps {STEPS}")

        async def stream() -> tuple[float, float]:
            body = {
                "model": "policy",
                "messages": [{"role": "user", "content": QUESTION}],
                "stream": True,
                "max_tokens": STEPS,
            }
            headers = {"authorization": f"Bearer {opened['keys'][0]}"}
            async with aiohttp.ClientSession() as client:
                began_s = time.perf_counter()
                async with client.post(f"{opened['url']}/chat/completions", json=body, headers=headers) as response:
                    assert await response.content.readany()
                    first_s = time.perf_counter() - began_s
                    assert (await response.text()).endswith("data: [DONE]\n\n")
                return first_s, time.perf_counter() - began_s

        steps, streams = list[float](), list[tuple[float, float]]()
        for _ in range(rounds):
            streams.append(asyncio.run(stream()))
            steps.append(server.command(f"steps {STEPS}")["step_s"])
    step_s = median(steps)
    first_s, whole_s = (median(times[part] for times in streams) for part in (0, 1))
    show(
        "first byte of a stream",
        f"{first_s * 1e3:.1f} ms, {first_s / step_s:.2f} of a decoding step",
        "≤ 1",
        is_met=first_s <= step_s,
    )
    show("  a decoding step, and the whole reply", f"{step_s * 1e3:.1f} ms, {whole_s * 1e3:.0f} ms")


def measure_requests(folder: Path, count: int, rounds: int) -> None:
    """Show the CPU of a request beyond that of `policy.chat`."""
    with start_own("endpoint", "scripted", "0", folder=folder) as (server, _):
        costs: dict[str, list[float]] = {kind: [] for kind in ("chat", *KINDS)}
        for _ in range(rounds + 1):
            costs["chat"].append(measure_chat(server, count))
            for kind, stream in KINDS.items():
                costs[kind].append(load_endpoint(server, count, stream=stream)[0].cpu_ms)
    for kind in KINDS:
        # differences within a round: the speed of a shared machine changes between rounds
        beyond = median(cost - chat for cost, chat in zip(costs[kind][1:], costs["chat"][1:], strict=True))
        show(f"{kind} request, beyond policy.chat", f"{beyond:.2f} ms", f"≤ {GOAL_MS:g} ms", is_met=beyond <= GOAL_MS)
    show("  policy.chat", f"{median(costs['chat'][1:]):.2f} ms")


@contextmanager
def start_litellm(python: str, folder: Path) -> Generator[tuple[Process, str]]:
    """Run litellm's proxy with a stand-in for the provider, and yield its address."""
    with start_own("openai", folder=folder) as (_, provider):
        port, config = free_port(), folder / "litellm.json"
        route = {"model": "openai/policy", "api_base": f"{provider['root']}/v1", "api_key": "none"}
        config.write_text(json.dumps({"model_list": [{"model_name": "policy", "litellm_params": route}]}))
        command = [str(Path(python).with_name("litellm")), "--config", str(config), "--host", "127.0.0.1"]
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": PEER_KEY}
        with start_peer(*command, "--port", str(port), port=port, log=folder / "litellm.log", env=env) as peer:
            yield peer, f"http://127.0.0.1:{port}/v1"


@contextmanager
def start_capture_proxy(
    python: str, folder: Path, model: str, service: Mapping[str, str]
) -> Generator[tuple[Process, str]]:
    """Run tinker-cookbook's capture proxy at the stand-in of a service, and yield its address."""
    port = free_port()
    command = [python, "-m", "tinker_cookbook.capture.proxy.serve", "--port", str(port), "--base-model", model]
    command += ["--renderer-name", "qwen3", "--store-data-dir", str(folder / "captured"), "--auth-token", PEER_KEY]
    try:
        with start_peer(*command, port=port, log=folder / "capture.log", env=service) as peer:
            yield peer, f"http://127.0.0.1:{port}/v1"
    finally:  # the store of the proxy outlives it
        os.kill(json.loads((folder / "captured" / "daemon.json").read_text())["pid"], signal.SIGTERM)


def compare(name: str, own: Process, peer: Process, peer_url: str, *, count: int, rounds: int) -> None:
    """Show the costs of the endpoint and of a peer."""
    loads: dict[tuple[str, str], list[Load]] = {(side, kind): [] for side in ("own", "peer") for kind in KINDS}
    for _ in range(rounds + 1):
        for kind, stream in KINDS.items():
            loads["own", kind].append(load_endpoint(own, count, stream=stream)[0])
            loads["peer", kind].append(load(peer, peer_url, [PEER_KEY] * count, stream=stream))
    for kind in KINDS:
        ours, theirs = (
            Load(*(median(getattr(item, field) for item in loads[side, kind][1:]) for field in Load.__slots__))
            for side in ("own", "peer")
        )
        show(
            f"{name}, {kind} request",
            f"{ours.cpu_ms:.2f} / {theirs.cpu_ms:.2f} ms of CPU = {ours.cpu_ms / theirs.cpu_ms:.2f}",
        )
        show(
            f"  requests per second (client {ours.client_ms:.2f} ms)",
            f"{ours.rate:.0f} / {theirs.rate:.0f} = {ours.rate / theirs.rate:.1f}",
        )


def compare_with_litellm(python: str, folder: Path, *, count: int, rounds: int) -> None:
    with (
        start_own("endpoint", "scripted", "0", folder=folder) as (own, _),
        start_litellm(python, folder) as (peer, url),
    ):
        compare("litellm", own, peer, url, count=count, rounds=rounds)


def compare_with_cookbook(python: str, folder: Path, *, count: int, rounds: int) -> None:
    from rlkit.testing import tiny_model

    model = str(tiny_model(folder / "model"))
    with ExitStack() as stack:
        _, service = stack.enter_context(start_own("tinker", model, folder=folder))
        env = {"TINKER_BASE_URL": service["root"], "TINKER_API_KEY": "tml-none"}
        own, _ = stack.enter_context(start_own("endpoint", "service", model, folder=folder, env=env))
        peer, url = stack.enter_context(start_capture_proxy(python, folder, model, env))
        compare("cookbook", own, peer, url, count=count, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--model", help="model of `first byte`; by default the engine's default model")
    parser.add_argument("--litellm", help="interpreter with litellm's proxy")
    parser.add_argument("--cookbook", help="interpreter with tinker-cookbook")
    parser.add_argument("--only", choices=["requests", "streams", "first-byte", "peers"], help="measure this only")
    parser.add_argument("--quick", action="store_true", help="little work, a tiny model: shows that all works")
    options = parser.parse_args()
    rounds, count = (1, 2) if options.quick else (options.rounds, options.conversations)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.only in (None, "requests"):
            measure_requests(folder, count, rounds)
        if options.only in (None, "streams"):
            measure_streams(folder, 8 if options.quick else 256, 0.1 if options.quick else STREAM_S)
        if options.only in (None, "first-byte"):
            measure_first_byte(folder, find_model(options.model, folder, is_tiny=options.quick), rounds)
        if options.litellm and options.only in (None, "peers"):
            compare_with_litellm(options.litellm, folder, count=count, rounds=rounds)
        if options.cookbook and options.only in (None, "peers"):
            compare_with_cookbook(options.cookbook, folder, count=count, rounds=rounds)


def find_model(name: str | None, folder: Path, *, is_tiny: bool) -> str:
    from rlkit.engine.model.model_files import DEFAULT_MODEL
    from rlkit.testing import byte_model

    return name or (str(byte_model(folder / "byte-model")) if is_tiny else DEFAULT_MODEL)


if __name__ == "__main__":
    main()
