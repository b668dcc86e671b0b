"""`rlkit train --dry-run`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Never

from rlkit.cli.common.arguments import resolve
from rlkit.cli.common.output import Output

if TYPE_CHECKING:
    from rlkit.config.schema import Config
    from rlkit.cost.budget import Spent
    from rlkit.cost.estimate import Band, Estimate
    from rlkit.dry_run.rehearse import Rehearsal

FAILED = 1

_TOLD_S = 10.0
"""How often a person is told what is being done."""


def run(arguments: Sequence[str], output: Output, *, name: str | None, pilot: int, quiet: bool) -> int:
    """Play a run in small, and print what works and what the whole one will take. Returns the exit code.

    What environments print goes to stderr. One that holds up everything else for longer than a rollout may take ends
    the process.
    """
    resolved = resolve(arguments, name=name)
    say = output.silent if quiet else output.note
    say("a dry run: on a simulated service, with replies that mean nothing")
    from rlkit._util import threads
    from rlkit.cli.common.held import ended_if_held
    from rlkit.dry_run.rehearse import rehearse

    doing = [""]

    async def rehearsed(note: Callable[[str], None]) -> Rehearsal:
        def begins(message: str) -> None:
            doing[0] = message
            note(message)

        with ended_if_held(longest_s(resolved.config), lambda told: _end(output, f"{doing[0]}: {told}")):
            return await rehearse(resolved, pilot=pilot, note=begins)

    # What environments print must not come between the lines of the result; threads of theirs may outlast the run.
    with redirect_stdout(output.err):
        with _still(say) as note:
            made = threads.run(rehearsed(note))
        if output.json:
            parts = [asdict(part) for part in made.parts]
            output.data(
                {
                    "ok": made.passed,
                    "parts": parts,
                    "estimate": made.estimate and made.estimate.to_json(),
                    "hosted": made.hosted and made.hosted.to_json(),
                }
            )
        else:
            output.line(table(made))
    return 0 if made.passed else FAILED


def longest_s(config: Config) -> float:
    """Seconds that a rollout of any environment of a run may take, evaluations included."""
    specs = [*config.envs.values(), *config.eval.envs.values()]
    return max(spec.timeout_s or config.rollouts.timeout_s for spec in specs)


def _end(output: Output, told: str) -> Never:
    """End the process at once, since its event loop does not come back."""
    message = f"{told}: it must await what takes long, or do that in a thread (asyncio.to_thread)"
    output.error(message)
    if output.json:
        output.data({"error": message, "type": "EnvironmentFault", "exit_code": FAILED})
    os._exit(FAILED)


@contextmanager
def _still(say: Callable[[str], None]) -> Generator[Callable[[str], None]]:
    """Tells what is being done, and again while it goes on: also when an environment holds up everything else."""
    ended = threading.Event()
    doing: list[tuple[str, float]] = []

    def note(message: str) -> None:
        doing[:] = [(message, time.monotonic())]
        say(message)

    def repeat() -> None:
        while not ended.wait(_TOLD_S):
            for message, began in doing:
                say(f"still {message} ({time.monotonic() - began:.0f} s)")

    repeating = threading.Thread(target=repeat, daemon=True)
    repeating.start()
    try:
        yield note
    finally:
        ended.set()
        repeating.join()  # it may be in the middle of a line


def table(made: Rehearsal) -> str:
    """A line for each part, and the estimate below them."""
    width = max(len(part.name) for part in made.parts)
    lines = [f"{part.status:9}  {part.name:{width}}  {part.detail}" for part in made.parts]
    if made.estimate is not None:
        lines.append(f"the whole run takes {expected(made.estimate)}")
        asked = any(part.name == "service" and part.status == "ok" for part in made.parts)
        unknown = "not known" if asked else "not known; --pilot 1 measures it"
        lines.append(f"  time: {made.estimate.speed if made.estimate.seconds else unknown}")
    if made.hosted is not None and made.hosted.usd is not None and made.hosted.seconds is not None:
        hosted = f"{_dollars(made.hosted.usd)}, {_durations(made.hosted.seconds)}"
        lines.append(f"  on the hosted Tinker service: {hosted} ({made.hosted.speed})")
    return "\n".join(lines)


def expected(estimate: Estimate) -> str:
    """`58,000 to 98,000 tokens, $0.10 to $0.35, 2 h 5 min to 3 h 0 min`."""
    parts = [f"{_between(*(f'{value:,.0f}' for value in _ends(estimate.tokens)))} tokens"]
    if estimate.usd is not None:
        parts.append(_dollars(estimate.usd))
    if estimate.seconds is not None:
        parts.append(_durations(estimate.seconds))
    return ", ".join(parts)


def used(spent: Spent) -> str:
    """`71,512 tokens, $0.21, 2 h 11 min`."""
    from rlkit.trackers.console import duration

    price = [] if spent.usd is None else [dollars(spent.usd)]
    return ", ".join([f"{spent.tokens:,} tokens", *price, duration(spent.seconds)])


def dollars(value: float) -> str:
    """Cents, or two digits of what is less than ten of them."""
    return f"${value:,.2f}" if value >= 0.1 or not value else f"${value:.2g}"


def _dollars(band: Band) -> str:
    return _between(*(dollars(value) for value in _ends(band)))


def _durations(band: Band) -> str:
    from rlkit.trackers.console import duration

    return _between(*(duration(value) for value in _ends(band)))


def _ends(band: Band) -> tuple[float, float]:
    return band.low, band.high


def _between(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"
