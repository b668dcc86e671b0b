"""Ctrl-C: the first finishes what is being done and saves, the second stops.

Invariant: after the second signal the process ends, whatever holds it up.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Never

from rlkit.cli.common.guard import INTERRUPTED

CLEAN_UP_S = 10.0
"""What clean-up (containers, the engine) may take after the second signal."""


class Interruptible:
    """Runs a coroutine that a signal can cancel.

    An exception out of the middle of it could part a process that was just started from the code that ends it, and what
    cancels every task at once, the event loop's own among them, could leave that code waiting for ever.
    """

    def __init__(self) -> None:
        self._cancel: Callable[[], object] | None = None
        self._cancelled = False

    def run[T](self, main: Coroutine[Any, Any, T]) -> T:
        """Do `rlkit._util.threads.run`; KeyboardInterrupt if it was interrupted."""
        import asyncio  # here, because `--help` needs none of it

        from rlkit._util.threads import run

        async def noted() -> T:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                return await main
            finally:
                self._cancel = None

        try:
            return run(noted())
        except asyncio.CancelledError:
            if self._cancelled:
                raise KeyboardInterrupt from None
            raise

    def interrupt(self) -> None:
        """Cancel what runs, for a handler of signals; KeyboardInterrupt if nothing runs."""
        if self._cancel is None:
            raise KeyboardInterrupt
        self._cancelled = True
        self._cancel()


def run_terminable[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that Ctrl-C and SIGTERM cancel, so that containers and sandboxes go, too."""
    interruptible = Interruptible()
    before = signal.signal(signal.SIGTERM, lambda number, frame: interruptible.interrupt())
    try:
        return interruptible.run(main)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def graceful(
    request: Callable[[], None],
    say: Callable[[str], None],
    *,
    message: str,
    ready: Callable[[], bool] = lambda: True,
    clean_up_s: float = CLEAN_UP_S,
) -> Generator[Interruptible]:
    """While it is open, the first SIGINT or SIGTERM calls `request` and the second raises KeyboardInterrupt.

    A clean-up that takes longer than `clean_up_s` after that, or another signal, ends the process with code 130. The
    yielded object runs a coroutine so that the second signal cancels it.

    Args:
        request: asks what runs to end.
        say: takes `message` at the first signal, on another thread.
        ready: returns whether there is something to ask; until then the first signal raises KeyboardInterrupt.
    """
    received, interruptible = 0, Interruptible()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == 1 and not ready():
            received = 2
        if received == 1:
            request()
            # Another thread, because this one may be inside a write to the same stream.
            threading.Thread(target=say, args=(message,), daemon=True).start()
        elif received == 2:
            threading.Thread(target=_end_in, args=(clean_up_s,), daemon=True).start()
            interruptible.interrupt()
        else:
            _end("stopped without cleaning up")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interruptible
    finally:
        if received < 2:  # past that, Ctrl-C during the clean-up must still end the process
            for number, handler in before.items():
                signal.signal(number, handler)


def _end_in(seconds: float) -> None:
    threading.Event().wait(seconds)
    _end(f"stopped: cleaning up took longer than {seconds:.0f} s")


def _end(message: str) -> Never:
    """End the process, past every lock that may be held, with the cursor that a panel may have hidden shown again."""
    show_cursor = "\x1b[?25h" if os.isatty(2) else ""
    os.write(2, f"{show_cursor}{message}\n".encode())
    os._exit(INTERRUPTED)
