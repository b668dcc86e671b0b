"""Whether an environment keeps its promises: a check that its author runs before the first training step.

    report = await rlkit.check.check(Reverse("hello"))
    assert report.ok, report.findings

Invariant: the checker ends, and leaves the environment, the process and its clock as they were: all play happens in a
forked process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import cast

from rlkit.chat.format import ChatFormat
from rlkit.check.report import Finding, Report, Status
from rlkit.env import Env, TaskSource
from rlkit.errors import RlkitError, UsageError
from rlkit.types import Json

__all__ = ["Finding", "Report", "check"]

MARGIN_S = 1.0
"""How much longer than a rollout's time the checker waits before it takes the process for blocked."""


async def check(
    env_or_source: Env | TaskSource | Sequence[Env],
    *,
    chat: ChatFormat | None = None,
    timeout_s: float = 10.0,
    tasks: int = 5,
    seed: int = 0,
) -> Report:
    """Play an environment with scripted replies and report what it does wrong.

    Checked: pickling; the prompt; the reward of the gold and of an empty answer; that conversations extend their exact
    tokens; the turn limit; what rollouts leave behind, cancelled or not; odd replies; that rollouts do not change the
    environment; that the reward depends on neither the time, nor chance, nor what was played before.

    An environment may say more about itself: `gold: str` deserves the full reward; `max_reward: float` is the full
    reward (1.0 otherwise); `stochastic = True` means that chance belongs to the task.

    Args:
        chat: the model's format; bytes in ChatML's shape unless given.
        timeout_s: for one rollout.
        tasks: how many tasks of a source are played.
        seed: chooses tasks of a sequence and the noise among the replies.

    Raises:
        UsageError: there is nothing to play.
    """
    if tasks < 1 or timeout_s <= 0:
        raise UsageError(f"check needs at least one task and some time, not tasks={tasks} and timeout_s={timeout_s}")
    from rlkit.check import examine
    from rlkit.check.play import Player
    from rlkit.testing.policies import ByteChat

    source = _as_source(env_or_source)

    def work(say: Callable[[Json], None]) -> None:
        def tell(finding: Finding) -> None:
            say({"finding": [finding.check, finding.status, finding.detail, finding.fix]})

        player = Player(chat or ByteChat(), timeout_s, lambda doing: say({"doing": doing}))
        player.say("drawing tasks")
        envs, drawn = examine.draw(source, tasks=tasks, seed=seed)
        if not envs:
            return say({"usage": "the source has no tasks to check"})
        tell(drawn)
        # the last word is sent before the loop ends: to end, it would wait for a rollout that swallows cancellation
        asyncio.run(examine.examine(envs, player, seed=seed, tell=tell, done=lambda: say(None)))

    stop = threading.Event()
    try:
        return await asyncio.to_thread(_supervise, work, timeout_s=timeout_s, stop=stop)
    finally:
        stop.set()


def _as_source(given: object) -> TaskSource | Sequence[Env]:
    match given:
        case type():
            raise UsageError(f"check plays an environment, not a class: give an instance of {given.__name__}")
        case Sequence() if given:
            return cast("Sequence[Env]", given)
        case _ if isinstance(given, Env):
            return [given]
        case TaskSource():
            return given
        case _:
            raise UsageError(f"there is no environment to check in {given!r}: it needs a rollout(policy) method")


def _supervise(work: Callable[[Callable[[Json], None]], None], *, timeout_s: float, stop: threading.Event) -> Report:
    from rlkit.check import examine
    from rlkit.check.isolate import Died, Silent, isolated
    from rlkit.check.play import GRACE_S

    findings, doing = list[Finding](), ""
    try:
        for message in isolated(work, silence_s=timeout_s + GRACE_S + MARGIN_S, stop=stop):
            match message:
                case {"doing": str(doing)}:
                    pass
                case {"finding": [name, status, detail, fix]}:
                    findings.append(Finding(str(name), cast("Status", status), str(detail), str(fix)))
                case {"usage": str(complaint)}:
                    raise UsageError(complaint)
                case _:
                    raise RlkitError(f"the checker itself failed at {doing}: {message}")
    except Silent:
        detail = f"{doing}: it blocks the event loop for more than {timeout_s:g} s"
        fix = "await what takes long (asyncio.to_thread for plain functions), and give it a time limit"
        findings.append(Finding(examine.TIME, "failed", detail, fix))
    except Died as error:
        fix = "run what can crash or exit in a process of its own"
        findings.append(Finding(examine.TIME, "failed", f"{doing}: {error}", fix))
    reported = {finding.check for finding in findings}
    rest = [Finding(name, "skipped", "not played to its end") for name in examine.CHECKS if name not in reported]
    return Report((*findings, *rest))
