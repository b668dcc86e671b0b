"""`rlkit train --dry-run`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Never

from rlkit.cli.common.output import Data, Output
from rlkit.cli.common.progress import repeat
from rlkit.trackers.console import render_band, render_dollars, render_duration, render_estimate

if TYPE_CHECKING:
    from rlkit._util.frames import Place
    from rlkit.config.schema import Config
    from rlkit.dry_run.rehearse import Rehearsal

FAILED = 1


def run(arguments: Sequence[str], output: Output, *, name: str | None, pilot: int, quiet: bool) -> int:
    """Play a run in small, and print what works and what the whole one will take. Returns the exit code.

    What environments print goes to stderr. One that holds up everything else for longer than a rollout may take ends
    the process.
    """
    from rlkit.config import load_arguments

    resolved = load_arguments(arguments, name=name)
    say = output.silent if quiet else output.note
    say("a dry run: on a simulated service, with replies that mean nothing")
    from rlkit._util import threads
    from rlkit._util.loop_holds import loop_holds
    from rlkit.dry_run.rehearse import rehearse

    doing, since_s = "", time.monotonic()

    def begin(message: str) -> None:
        nonlocal doing, since_s
        doing, since_s = message, time.monotonic()
        say(message)

    def tell() -> None:
        if doing:
            say(f"still {doing} ({time.monotonic() - since_s:.0f} s)")

    async def rehearsed() -> Rehearsal:
        limit_s = longest_s(resolved.config)

        def end(place: Place) -> Never:
            problem = f"a rollout blocked the event loop for more than {limit_s:g} s (timeout_s)"
            _end(output, f"{doing}: {problem}, at {place.file}:{place.line}, in {place.function}")

        with _threads_run(), loop_holds().watch(None, limit_s=limit_s, end=end):
            return await rehearse(resolved, pilot=pilot, note=begin)

    # What environments print must not come between the lines of the result; threads of theirs may outlast the run.
    with redirect_stdout(output.err):
        with repeat(tell):
            rehearsal = threads.run(rehearsed())
        record: dict[str, Data] = {"ok": rehearsal.passed, "parts": [asdict(part) for part in rehearsal.parts]}
        record["estimate"] = rehearsal.estimate and rehearsal.estimate.to_json()
        record["hosted"] = rehearsal.hosted and rehearsal.hosted.to_json()
        output.result(record, table(rehearsal))
    return 0 if rehearsal.passed else FAILED


def longest_s(config: Config) -> float:
    """Return the longest time limit of a rollout of any environment of a run, evaluations included."""
    specs = [*config.envs.values(), *config.eval.envs.values()]
    return max(spec.timeout_s or config.rollouts.timeout_s for spec in specs)


def _end(output: Output, problem: str) -> Never:
    """End the process at once, since its event loop does not come back."""
    message = f"{problem}: await slow calls, or run them in a thread (asyncio.to_thread)"
    output.failure(message, kind="EnvironmentFault", exit_code=FAILED)
    os._exit(FAILED)


@contextmanager
def _threads_run() -> Generator[None]:
    """Let threads run during code that releases the interpreter only to signals, such as a regular expression."""
    before = signal.signal(signal.SIGVTALRM, lambda number, frame: time.sleep(0.001))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.2, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def table(rehearsal: Rehearsal) -> str:
    """Return a line for each part, and the estimate below them."""
    width = max(len(part.name) for part in rehearsal.parts)
    lines = [f"{part.status:9}  {part.name:{width}}  {part.detail}" for part in rehearsal.parts]
    if rehearsal.estimate is not None:
        lines.append(f"the whole run takes {render_estimate(rehearsal.estimate)}")
        is_piloted = any(part.name == "service" and part.status == "ok" for part in rehearsal.parts)
        unknown = "not known" if is_piloted else "not known; --pilot 1 measures it"
        lines.append(f"  time: {rehearsal.estimate.speed if rehearsal.estimate.seconds else unknown}")
    if rehearsal.hosted is not None and rehearsal.hosted.usd is not None and rehearsal.hosted.seconds is not None:
        price = render_band(rehearsal.hosted.usd, render_dollars)
        duration = render_band(rehearsal.hosted.seconds, render_duration)
        lines.append(f"  on the hosted Tinker service: {price}, {duration} ({rehearsal.hosted.speed})")
    return "\n".join(lines)
