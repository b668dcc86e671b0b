"""`rlkit train --dry-run`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Never

from rlkit.cli.common.guard import FAILED
from rlkit.cli.common.output import Output
from rlkit.cli.common.progress import report_periodically
from rlkit.trackers.rendering import render_band, render_dollars, render_duration, render_estimate

if TYPE_CHECKING:
    from rlkit._util.frames import Place
    from rlkit.config.schema import Config
    from rlkit.dry_run.rehearse import Rehearsal


def run(arguments: Sequence[str], output: Output, *, name: str | None, pilot: int, quiet: bool) -> int:
    """Rehearse a run on a simulated service, print results and the cost estimate, and return the exit code.

    Output of environments goes to stderr. The process ends if an environment blocks the event loop for longer than the
    time limit of a rollout.
    """
    from rlkit.config.loading.load import load_arguments

    resolved = load_arguments(arguments, name=name)
    note = output.silent if quiet else output.note
    note("dry run: simulated service, random replies")
    from rlkit._util import threads
    from rlkit._util.loop_holds import loop_holds
    from rlkit.dry_run.rehearse import rehearse

    stage, began_s = "", time.monotonic()

    def begin(message: str) -> None:
        nonlocal stage, began_s
        stage, began_s = message, time.monotonic()
        note(message)

    def report_progress() -> None:
        if stage:
            note(f"still {stage} ({time.monotonic() - began_s:.0f} s)")

    async def run_rehearsal() -> Rehearsal:
        limit_s = longest_timeout_s(resolved.config)

        def end(place: Place) -> Never:
            problem = f"a rollout blocked the event loop for more than {limit_s:g} s (timeout_s)"
            location = f"{place.file}:{place.line}, in {place.function}"
            remedy = "await slow calls, or run them in a thread (asyncio.to_thread)"
            message = f"{stage}: {problem}, at {location}: {remedy}"
            output.failure(message, kind="EnvironmentFault", exit_code=FAILED)
            os._exit(FAILED)  # the blocked event loop cannot be stopped otherwise

        with _let_threads_run(), loop_holds().watch(None, limit_s=limit_s, end=end):
            return await rehearse(resolved, pilot=pilot, note=begin)

    # Environments' threads may still print while the result is written.
    with redirect_stdout(output.err), resolved.locate_errors():
        with report_periodically(report_progress):
            rehearsal = threads.run(run_rehearsal())
        output.result({"ok": rehearsal.ok, **asdict(rehearsal)}, render_table(rehearsal))
    return 0 if rehearsal.ok else FAILED


def longest_timeout_s(config: Config) -> float:
    """Return the longest time limit of a rollout in seconds, over all environments of training and evaluation."""
    specs = [*config.envs.values(), *config.eval.envs.values()]
    return max(spec.timeout_s or config.rollouts.timeout_s for spec in specs)


@contextmanager
def _let_threads_run() -> Generator[None]:
    """Let other threads run during C code that holds the GIL but checks for signals, such as a regular expression."""
    previous = signal.signal(signal.SIGVTALRM, lambda number, frame: time.sleep(0.001))
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.2, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def render_table(rehearsal: Rehearsal) -> str:
    """Return a line for each part, followed by the estimate."""
    width = max(len(part.name) for part in rehearsal.parts)
    lines = [f"{part.status:9}  {part.name:{width}}  {part.detail}" for part in rehearsal.parts]
    if rehearsal.estimate is not None:
        lines.append(f"the whole run takes {render_estimate(rehearsal.estimate)}")
        is_piloted = any(part.name == "service" and part.status == "ok" for part in rehearsal.parts)
        unknown = "unknown" if is_piloted else "unknown; --pilot 1 measures it"
        lines.append(f"  time: {rehearsal.estimate.speed if rehearsal.estimate.seconds else unknown}")
    hosted = rehearsal.hosted_estimate
    if hosted is not None and hosted.usd is not None and hosted.seconds is not None:
        price, duration = render_band(hosted.usd, render_dollars), render_band(hosted.seconds, render_duration)
        lines.append(f"  on the hosted Tinker service: {price}, {duration} ({hosted.speed})")
    return "\n".join(lines)
