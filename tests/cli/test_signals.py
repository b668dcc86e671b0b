from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlkit.cli.common.signals import graceful_shutdown, run_terminable
from tests.limits import HANG_S

# A run that waits; `stubborn` ones also hold up their own end. Many short sleeps, because Python does not wake from one
# for a signal that comes just before it.
PROGRAM = """
import sys, time
from rlkit.cli.common.signals import graceful_shutdown
said = lambda text: print(text, flush=True)
try:
    clean_up_s = 0.5 if "stubborn" in sys.argv else 3600
    with graceful_shutdown(lambda: said("requested"), said, message="finishing", clean_up_s=clean_up_s):
        said("ready")
        try:
            for _ in range(72_000):
                time.sleep(0.05)
        finally:
            if "stubborn" in sys.argv:
                time.sleep(3600)
except KeyboardInterrupt:
    said("stopped")
    sys.exit(130)
"""


# A thread that never ends, as of a grader that waits for a sandbox.
BLOCKED = """
import asyncio, sys, threading
from rlkit.cli.common.signals import graceful_shutdown

async def main():
    try:
        async with asyncio.timeout(0.1):
            await asyncio.to_thread(threading.Event().wait)
    except TimeoutError:
        return await asyncio.to_thread(lambda: "kept")

with graceful_shutdown(lambda: None, print, message="") as interruptible:
    print(interruptible.run(main()) * 100_000)
sys.exit(4)
"""


def start_process(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def read_lines(process: subprocess.Popen[str], lines: int) -> set[str]:
    assert process.stdout is not None
    return {process.stdout.readline().strip() for _ in range(lines)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_requests_a_stop_and_the_second_stops(number: signal.Signals) -> None:
    with start_process() as process:
        process.send_signal(number)
        assert read_lines(process, 2) == {"requested", "finishing"}
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(HANG_S) == 130
        assert read_lines(process, 1) == {"stopped"}


def test_blocked_cleanup_is_not_awaited() -> None:
    with start_process("stubborn") as process:
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            read_lines(process, 1)
            time.sleep(0.1)
        assert process.wait(HANG_S) == 130
        assert process.stderr is not None
        assert process.stderr.read().startswith("stopped: cleaning up took longer")


def test_signal_handlers_of_the_caller_are_restored() -> None:
    handlers_before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    stop_requested = threading.Event()
    with graceful_shutdown(stop_requested.set, lambda _: None, message=""):
        assert signal.getsignal(signal.SIGINT) != handlers_before[0]
        signal.raise_signal(signal.SIGTERM)
        assert stop_requested.is_set()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers_before


def test_second_signal_cancels_a_coroutine_that_cleans_up() -> None:
    handlers_before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    cleaned = False

    async def main() -> None:
        nonlocal cleaned
        try:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    try:
        with (
            pytest.raises(KeyboardInterrupt),
            graceful_shutdown(lambda: None, lambda _: None, message="", clean_up_s=1e6) as interruptible,
        ):
            interruptible.run(main())
        assert cleaned
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers_before, strict=True):
            signal.signal(number, handler)


def test_sigterm_interrupts_a_coroutine_that_cleans_up() -> None:
    handler_before, cleaned = signal.getsignal(signal.SIGTERM), False

    async def main() -> None:
        nonlocal cleaned
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    with pytest.raises(KeyboardInterrupt):
        run_terminable(main())
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) == handler_before


def test_coroutine_without_an_interrupt_completes() -> None:
    async def main(*, cancelled: bool) -> str:
        if cancelled:
            raise asyncio.CancelledError
        return "done"

    with graceful_shutdown(lambda: None, lambda _: None, message="") as interruptible:
        assert interruptible.run(main(cancelled=False)) == "done"
        with pytest.raises(asyncio.CancelledError):
            interruptible.run(main(cancelled=True))


def test_a_thread_that_never_ends_does_not_keep_the_process() -> None:
    process = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (process.returncode, process.stderr) == (4, "")
    assert process.stdout == "kept" * 100_000 + "\n"


def test_a_run_without_signals_changes_nothing(tmp_path: Path) -> None:
    with graceful_shutdown(lambda: None, lambda _: None, message=""):
        (tmp_path / "x").write_text("")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
