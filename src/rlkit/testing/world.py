"""State of a simulated service: latencies, faults, counts and checkpoints.

Invariant: the seed determines all random values.
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
    """Latencies of the service, in seconds.

    Args:
        first_s: time before the first token, and of a request for log-probabilities.
        token_s: time of each further token; a request takes as long as its longest sample.
        mean_tokens: mean length of a completion before `max_tokens` truncates it; the distribution is log-normal.
        sigma: standard deviation of the logarithm of that length.
        slow_share: share of samples that take `slow_factor` times as long.
        gradient_s: time of a gradient without its tokens.
        trained_tokens_per_s: speed of a gradient.
        step_s: time of an optimiser step.
        save_s: time to save weights or make a sampler of them.
        load_s: time to load or initialise weights.
        clock_s: period of the service's clock; an idle service starts training requests at its ticks. 0 for no clock.
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
    """Injected fault.

    Args:
        kind: an HTTP status, or a future that fails (`broken`), is cancelled or never resolves (`hang`).
        call: kind of calls: `sample`, `score`, `gradient`, `step`, `save`, `load` or `*` for any.
        call_number: number of the only call that fails, from 1.
        share: share of calls that fail at random, without `call_number`.
        after_s: start of the fault.
        until_s: end of the fault.
    """

    kind: FaultKind
    call: str = "*"
    call_number: int | None = None
    share: float = 1.0
    after_s: float = 0.0
    until_s: float = math.inf


@dataclass(slots=True, eq=False)
class World:
    """State that outlives a client: checkpoints, counts and faults. Pass it to a second service to resume.

    Args:
        seed: seed of all random values.
        faults: injected faults; the first match applies.
    """

    seed: int = 0
    faults: Sequence[Fault] = ()
    calls: Counter[str] = field(default_factory=Counter[str])
    """Number of requests by kind; `samples`, `prefill_tokens` and `sampled_tokens` count their contents."""
    step_digests: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    """Digests of each optimiser step's sequences, in their order."""
    checkpoints: dict[str, int] = field(default_factory=dict[str, int])
    model: str = "simulated"
    """Model of the last new adapter, which all checkpoints have."""
    max_concurrent_samples: int = 0
    """Highest number of concurrent samples."""
    _requests: Counter[str] = field(default_factory=Counter[str])
    _repeats: Counter[bytes] = field(default_factory=Counter[bytes])
    _live: int = 0

    def next_fault(self, call: str, now_s: float) -> FaultKind | None:
        """Count a call of this kind, and return its fault, if any."""
        self._requests.update([call, "*"])
        for index, fault in enumerate(self.faults):
            if fault.call not in (call, "*") or not fault.after_s <= now_s <= fault.until_s:
                continue
            number = self._requests[fault.call]
            if number == fault.call_number or (
                fault.call_number is None and self.draw_uniform("fault", index, number) < fault.share
            ):
                return fault.kind
        return None

    def draw_uniform(self, *path: object) -> float:
        """Return a number in [0, 1), determined by the seed and the path."""
        return digest(self.seed, *path) / 2**64

    def count_repeat(self, prompt: bytes) -> int:
        """Return the number of earlier requests for a prompt without a seed."""
        self._repeats[prompt] += 1
        return self._repeats[prompt] - 1

    def count_samples(self, change: int) -> None:
        """Count samples that start, or with a negative change samples that end."""
        self._live += change
        self.max_concurrent_samples = max(self.max_concurrent_samples, self._live)


def digest(*parts: object) -> int:
    """Return a 64-bit hash of the parts."""
    text = "/".join(part.hex() if isinstance(part, bytes) else str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())
