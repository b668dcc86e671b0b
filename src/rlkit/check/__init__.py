"""A check of an environment's promises, which its author runs before the first training step.

    report = await rlkit.check.check(Reverse("hello"))
    assert report.ok, report.findings

Invariant: the checker ends, and leaves the environment, the process and its clock as they were: all play happens in a
forked process.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, cast

from rlkit.chat.format import ChatFormat
from rlkit.check.report import Finding, Report
from rlkit.env import Env, TaskSource
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from rlkit.check.forked_process import Send

__all__ = ["Finding", "Report", "check"]


async def check(
    env_or_source: Env | TaskSource | Sequence[Env],
    *,
    chat: ChatFormat | None = None,
    timeout_s: float = 10.0,
    tasks: int = 5,
    seed: int = 0,
) -> Report:
    """WatchedRollout an environment with scripted replies and report what it does wrong.

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
    from rlkit.check.checks import CHECKS, TIME, run_checks
    from rlkit.check.context import CheckContext
    from rlkit.check.forked_process import run_isolated
    from rlkit.check.player import Player
    from rlkit.testing.policies import ByteChat

    source = _as_source(env_or_source)

    def work(send: Send[Finding]) -> Coroutine[object, object, None]:
        player = Player(chat or ByteChat(), timeout_s, send)
        return run_checks(CheckContext.of(source, player, tasks=tasks, seed=seed), send)

    findings, abort = await run_isolated(work, timeout_s=timeout_s)
    if abort is not None:
        findings.append(Finding(TIME, "failed", abort.reason, abort.fix))
    reported = {finding.check for finding in findings}
    unplayed = [check.name for check in CHECKS if check.name not in reported]
    return Report((*findings, *(Finding(name, "skipped", "not played to its end") for name in unplayed)))


def _as_source(candidate: object) -> TaskSource | Sequence[Env]:
    match candidate:
        case type():
            raise UsageError(f"check plays an environment, not a class: give an instance of {candidate.__name__}")
        case Sequence() if candidate:
            return cast("Sequence[Env]", candidate)
        case _ if isinstance(candidate, Env):
            return [candidate]
        case TaskSource():
            return candidate
        case _:
            raise UsageError(f"there is no environment to check in {candidate!r}: it needs a rollout(policy) method")
