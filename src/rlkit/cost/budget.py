"""How much a run may use, over all the processes that work on it.

Invariant: once a limit is reached it stays reached, so that what stops at it stops once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields

from rlkit.cost.usage import Price, Usage
from rlkit.types import Json

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be used; None for as much as it takes.

    Args:
        usd: US dollars, at the known price.
        tokens: of all kinds.
        hours: that processes worked on the run.
    """

    usd: float | None = None
    tokens: int | None = None
    hours: float | None = None


_UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run has used.

    Args:
        tokens: of all kinds.
        usd: US dollars; None where the price is not known.
        seconds: that processes worked on it.
    """

    tokens: int
    usd: float | None
    seconds: float


class Budget:
    """Counts what a run uses, and says when that is too much.

    Args:
        price: needed for `limits.usd`.
        used: what the service was asked for by this process.
        clock: seconds; its zero does not matter.
        before: what `state_dict` gave for the processes before.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        price: Price | None,
        used: Callable[[], Usage],
        clock: Callable[[], float],
        before: Mapping[str, Json],
    ) -> None:
        if limits.usd is not None and price is None:
            raise ValueError("a limit in dollars needs a price")
        self._limits = limits
        self._price = price
        self._used = used
        self._pending = list[Callable[[], Usage]]()
        self._clock = clock
        self._began_s = clock()
        known = {name: int(value) for name, value in before.items() if isinstance(value, int)}
        self._before = Usage(**{field.name: known.get(field.name, 0) for field in fields(Usage)})
        seconds = before.get("seconds", 0.0)
        self._before_s = float(seconds) if isinstance(seconds, int | float) else 0.0

    def expect(self, pending: Callable[[], Usage]) -> None:
        """Count what is certain to be used as if it were used already, where a limit is concerned.

        Args:
            pending: returns the usage that is certain at the moment, such as training on what was played.
        """
        self._pending.append(pending)

    @property
    def usage(self) -> Usage:
        """Usage by all processes, up to now."""
        return self._before + self._used()

    @property
    def seconds(self) -> float:
        """Working time of all processes, up to now."""
        return self._before_s + self._clock() - self._began_s

    @property
    def reached(self) -> str | None:
        """The limit that is reached, as a phrase for people; None while there is something left."""
        limits = self._limits
        if limits == _UNLIMITED:  # every rollout asks
            return None
        pending = sum((pending() for pending in self._pending), Usage())
        usage, why = self.usage + pending, ", or needed for what was played" if pending.tokens else ""
        if limits.tokens is not None and usage.tokens >= limits.tokens:
            return f"budget_tokens: {usage.tokens:,} of {limits.tokens:,} tokens are used{why}"
        if limits.usd is not None and self._price is not None and (usd := self._price.usd(usage)) >= limits.usd:
            return f"budget_usd: about ${usd:,.2f} of ${limits.usd:,.2f} are spent{why}"
        if limits.hours is not None and self.seconds >= limits.hours * _HOUR_S:
            return f"max_hours: the run has taken {self.seconds / _HOUR_S:,.2f} of {limits.hours:,.2f} hours"
        return None

    @property
    def spent(self) -> Spent:
        """What all processes used, up to now."""
        usage = self.usage
        return Spent(usage.tokens, None if self._price is None else self._price.usd(usage), self.seconds)

    def metrics(self) -> dict[str, float]:
        """Return what all processes used up to now, under `usage/…`; dollars where the price is known."""
        usage = self.usage
        counts = {f"usage/{name}": float(value) for name, value in asdict(usage).items()}
        return counts if self._price is None else {**counts, "usage/usd": self._price.usd(usage)}

    def state_dict(self) -> dict[str, Json]:
        """Return what the next process must know."""
        return {**asdict(self.usage), "seconds": self.seconds}
