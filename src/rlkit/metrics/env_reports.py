"""Reports about the code of environments: the first failure of each, and lines that block the event loop.

Invariant: each failing environment and each blocking line is reported once during the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace

from rlkit._util.loop_holds import Hold
from rlkit.env import Task
from rlkit.metrics.diagnostics import Finding
from rlkit.types import Episode, Json

RULE = "blocking"

_FINDINGS_MAX = 20  # maximum number of findings of one run
_ERROR_CHARS = 500  # limit of the length of an error in a note
_ACTION = "await slow calls, or run the work in a thread: `await asyncio.to_thread(...)`"


@dataclass(kw_only=True, eq=False)
class BlockingFindings:
    """Convert holds of the event loop (`Hold`) to findings."""

    step: Callable[[], int] = lambda: 0  # function that returns the current step
    tell: Callable[[Finding], None]  # receives each new finding
    # Receives all findings as JSON, for each new finding and whenever the count of a finding doubles.
    record: Callable[[Sequence[Mapping[str, Json]]], None] = lambda findings: None
    _findings: dict[tuple[str, str], tuple[Finding, int, float]] = field(
        init=False, default_factory=dict[tuple[str, str], tuple[Finding, int, float]]
    )

    def add(self, hold: Hold) -> None:
        """Record a hold, and report it if its line is new."""
        key = (hold.env, "an unknown line" if hold.place is None else str(hold.place))
        step = self.step()
        new = key not in self._findings
        if new and len(self._findings) == _FINDINGS_MAX:
            return
        finding, times, longest_s = self._findings.get(key, (Finding(RULE, hold.env, step, step, "", _ACTION), 0, 0.0))
        times, longest_s = times + 1, max(longest_s, hold.seconds)
        often = "once" if times == 1 else f"{times} times"
        evidence = f"{key[1]} blocked the event loop {often}, for at most {longest_s:.1f} s: nothing else could run"
        finding = replace(finding, last=step, evidence=evidence)
        self._findings[key] = finding, times, longest_s
        if times & (times - 1) == 0:  # powers of two, because each record writes a file
            self.record([asdict(recorded) for recorded, _, _ in self._findings.values()])
        if new:
            self.tell(finding)


@dataclass(eq=False)
class FailureNotes:
    """Report the first failed episode of each environment."""

    note: Callable[[str], None]  # receives each message
    _: KW_ONLY
    redact: Callable[[str], str]  # removes secrets from an error
    prefix: str = ""  # text before the name of an environment, such as "the evaluation of "
    _envs: set[str] = field(init=False, default_factory=set[str])

    def add(self, task: Task, episode: Episode) -> None:
        """Report an episode if it is the first failed episode of its environment."""
        if episode.status != "failed" or task.name in self._envs:
            return
        self._envs.add(task.name)
        error = " ".join(self.redact(episode.error or "no reason").split())
        excerpt = error if len(error) <= _ERROR_CHARS else f"{error[:_ERROR_CHARS]} …"
        self.note(f"the first failed rollout of {self.prefix}{task.name}, task {task.id}: {excerpt}")
