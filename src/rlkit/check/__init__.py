"""Checks of an environment, to run before training.

    report = await rlkit.check.check(Reverse("hello"))
    assert report.ok, report.findings

Invariant: the check always ends, and all rollouts run in a forked process, so the caller's environment, process and
clock do not change.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence

from rlkit.chat.format import ChatFormat
from rlkit.check.checks import CHECKS, TIME, run_checks
from rlkit.check.context import CheckContext
from rlkit.check.forked_process import Send, run_isolated
from rlkit.check.player import Player
from rlkit.check.report import Finding, Report
from rlkit.config.loading.objects import list_envs
from rlkit.env import Env, TaskSource
from rlkit.errors import UsageError
from rlkit.testing.policies import ByteChat

__all__ = ["Finding", "Report", "check"]


async def check(
    env_or_source: Env | TaskSource | Sequence[Env],
    *,
    chat: ChatFormat | None = None,
    timeout_s: float = 10.0,
    tasks: int = 5,
    seed: int = 0,
) -> Report:
    """Play an environment with scripted replies, and report its faults.

    The checks cover pickling, the prompt, the reward of the gold answer and of an empty answer, exact tokens across
    turns, the turn limit, resource leaks, cancellation and odd replies. Rollouts must not change the environment, and
    the reward must not depend on the time, on chance or on earlier rollouts.

    Optional attributes of an environment: `gold` is an answer that earns the full reward, a text or a list of messages
    with tool calls. `max_reward: float` is the full reward (default 1.0; `math.inf` if there is none); no reward may
    exceed it. `stochastic = True` allows the reward to depend on chance. `judged_examples` is a list of pairs, fields
    and label, with which the verdicts of its `judge` are compared.

    Args:
        chat: the model's chat format; `ByteChat()` by default.
        timeout_s: limit of one rollout, in seconds.
        seed: seed of the choice of tasks and of the random replies.

    Raises:
        UsageError: there are no tasks.
    """
    if tasks < 1 or timeout_s <= 0:
        values = f"tasks={tasks} and timeout_s={timeout_s}"
        raise UsageError(f"check needs at least one task and a positive time limit, not {values}")
    is_source = isinstance(env_or_source, TaskSource)
    source = env_or_source if is_source else list_envs(env_or_source, subject="env_or_source is")

    def work(send: Send[Finding]) -> Coroutine[object, object, None]:
        player = Player(chat or ByteChat(), timeout_s, send)
        return run_checks(CheckContext.draw(source, player, tasks=tasks, seed=seed), send)

    findings, abort = await run_isolated(work, timeout_s=timeout_s)
    if abort is not None:
        findings.append(Finding(TIME, "failed", abort.reason, abort.fix))
    reported = {finding.check for finding in findings}
    skipped = [check.name for check in CHECKS if check.name not in reported]
    return Report((*findings, *(Finding(name, "skipped", "the checks ended early") for name in skipped)))
