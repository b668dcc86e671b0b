"""The world of a simulated service: its latencies, its faults, and what it remembers.

Invariant: everything that it makes up follows from its seed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

type FaultKind = Literal["429", "500", "408", "broken", "hang", "cancel"]


@dataclass(frozen=True, slots=True)
class Latency:
    """How long the service takes, in seconds.

    Args:
        first_s: of a sampling request, before the first token, and of one for log-probabilities.
        token_s: of each token after that; a request takes as long as its longest sample.
        mean_tokens: of a completion, log-normal, before `max_tokens` cuts it.
        sigma: of the logarithm of that length.
        slow_share: of the samples that take `slow_factor` times as long.
        gradient_s: of a gradient, beside its tokens.
        trained_tokens_per_s: of a gradient.
        save_s: of handing over or saving weights.
        load_s: of loading weights, and of making new ones.
        clock_s: a request for training that finds the service idle waits for the next tick of a clock; 0 for no clock.
    """

    first_s: float = 0.3
    token_s: float = 0.02
    mean_tokens: float = 20.0
    sigma: float = 0.5
    slow_share: float = 0.0
    slow_factor: float = 10.0
    gradient_s: float = 1.0
    trained_tokens_per_s: float = 20_000.0
    step_s: float = 0.5
    save_s: float = 1.0
    load_s: float = 1.0
    clock_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong.

    Args:
        kind: the answer: an HTTP status, a future that fails or is cancelled, or one that is never answered.
        call: to which calls: `sample`, `score`, `gradient`, `step`, `save`, `load` or `*` for any.
        at: only the N-th of them, counted from 1.
        share: of them, at random; without `at`.
        after_s: not before this time.
        until_s: not after this time.
    """

    kind: FaultKind
    call: str = "*"
    at: int | None = None
    share: float = 1.0
    after_s: float = 0.0
    until_s: float = math.inf


@dataclass(slots=True, eq=False)
class World:
    """What outlives a client: checkpoints, counts, and the faults to come. Give it to a second service to resume.

    Args:
        seed: of everything that the service makes up.
        faults: what goes wrong; the first that fits counts.
    """

    seed: int = 0
    faults: Sequence[Fault] = ()
    calls: Counter[str] = field(default_factory=Counter[str])
    """Requests by kind; `samples`, `prefill_tokens` and `sampled_tokens` count what they asked for."""
    trained: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """For each optimiser step, the digests of the sequences that it was taken on, in their order."""
    checkpoints: dict[str, int] = field(default_factory=dict[str, int])
    most_live: int = 0
    """Samples that were being drawn at once, at most."""
    _asked: Counter[str] = field(default_factory=Counter[str])
    _repeats: Counter[bytes] = field(default_factory=Counter[bytes])
    _live: int = 0

    def fault(self, call: str, now_s: float) -> FaultKind | None:
        """What goes wrong with the next call of this kind, if anything."""
        self._asked[call] += 1
        self._asked["*"] += 1
        for index, fault in enumerate(self.faults):
            if fault.call not in (call, "*") or not fault.after_s <= now_s <= fault.until_s:
                continue
            number = self._asked[fault.call]
            if number == fault.at or (fault.at is None and self.uniform("fault", index, number) < fault.share):
                return fault.kind
        return None

    def uniform(self, *path: object) -> float:
        """A number in [0, 1) for a purpose."""
        return digest(self.seed, *path) / 2**64

    def repeat(self, prompt: bytes) -> int:
        """How often a prompt was asked for before, without a seed."""
        self._repeats[prompt] += 1
        return self._repeats[prompt] - 1

    def begin(self, count: int) -> None:
        """So many samples begin to be drawn."""
        self._live += count
        self.most_live = max(self.most_live, self._live)

    def end(self, count: int) -> None:
        """They are done."""
        self._live -= count


def digest(*parts: object) -> int:
    """64 bits that follow from the parts."""
    text = "/".join(part.hex() if isinstance(part, bytes) else str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
