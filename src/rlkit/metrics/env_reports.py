"""Reports about the code of environments: the first failure of each, and lines that block the event loop.

Invariant: each failing environment and each blocking line is reported once during the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from rlkit._util.loop_holds import Hold
from rlkit.env import Task
from rlkit.metrics.diagnostics import Finding
from rlkit.types import Episode, Json

RULE = "blocking"

_FINDINGS_MAX = 20  # maximum number of findings of one run
_ERROR_CHARS = 500  # limit of the length of an error in a note
_ACTION = "await slow calls, or run the work in a thread: `await asyncio.to_thread(...)`"


def make_hold_reporter(
    *,
    tell: Callable[[Finding], None],
    get_step: Callable[[], int] = lambda: 0,
    record: Callable[[Sequence[Mapping[str, Json]]], None] = lambda findings: None,
) -> Callable[[Hold], None]:
    """Return a function that turns holds of the event loop into findings, one for each line.

    Args:
        tell: receives each new finding.
        get_step: returns the current step.
        record: receives all findings as JSON, for each new finding and whenever the count of a finding doubles.
    """
    findings = dict[tuple[str, str], tuple[Finding, int, float]]()

    def report(hold: Hold) -> None:
        key = (hold.env, "an unknown line" if hold.place is None else str(hold.place))
        step, is_new = get_step(), key not in findings
        if is_new and len(findings) == _FINDINGS_MAX:
            return
        finding, times, longest_s = findings.get(key, (Finding(RULE, hold.env, step, step, "", _ACTION), 0, 0.0))
        times, longest_s = times + 1, max(longest_s, hold.seconds)
        often = "once" if times == 1 else f"{times} times"
        evidence = f"{key[1]} blocked the event loop {often}, for at most {longest_s:.1f} s: nothing else could run"
        finding = replace(finding, last=step, evidence=evidence)
        findings[key] = finding, times, longest_s
        if times & (times - 1) == 0:  # powers of two, because each record writes a file
            record([asdict(recorded) for recorded, _, _ in findings.values()])
        if is_new:
            tell(finding)

    return report


def make_failure_reporter(
    note: Callable[[str], None], *, redact: Callable[[str], str], prefix: str = ""
) -> Callable[[Task, Episode], None]:
    """Return a function that notes the first failed episode of each environment.

    Args:
        redact: removes secrets from an error.
        prefix: text before the name of an environment, such as "the evaluation of ".
    """
    failed_envs = set[str]()

    def report(task: Task, episode: Episode) -> None:
        if episode.status != "failed" or task.name in failed_envs:
            return
        failed_envs.add(task.name)
        error = " ".join(redact(episode.error or "no reason").split())
        excerpt = error if len(error) <= _ERROR_CHARS else f"{error[:_ERROR_CHARS]} …"
        note(f"the first failed rollout of {prefix}{task.name}, task {task.id}: {excerpt}")

    return report
