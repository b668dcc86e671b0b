"""What the hosted Tinker service asks for a model's tokens.

Invariant: a price is known whole, with the day on which it was read, or not at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from rlkit.cost.usage import Usage
from rlkit.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rlkit.config.schema import Config

_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for a million tokens of each kind.

    Args:
        prefill: of prompts.
        cached: of prompts that were computed before.
        sample: that are drawn.
        train: of sequences that are trained on.
        date: when this was the price, as 2026-10-07; "" for one that the user gave.
    """

    prefill: float
    cached: float
    sample: float
    train: float
    date: str = ""

    def usd(self, usage: Usage) -> float:
        """What was used costs: Σ tokens × price / 10⁶, without the storage of checkpoints."""
        return (
            usage.prefill_tokens * self.prefill
            + usage.cached_tokens * self.cached
            + usage.sampled_tokens * self.sample
            + usage.trained_tokens * self.train
        ) / _MILLION


FREE = Price(0.0, 0.0, 0.0, 0.0)
"""Of the embedded engine."""


def price_of(config: Config, kind: Literal["hosted", "url", "engine"]) -> Price | None:
    """What a run's tokens cost; None where that is not known.

    The embedded engine is free. The table is that of the hosted service, and says nothing of another one.

    Raises:
        ConfigError: the configuration sets a limit in dollars, or prices, that cannot have an effect.
    """
    given = config.prices
    if kind == "engine":
        for name, value in (("budget_usd", config.budget_usd), ("prices", given.prefill)):
            if value is not None:
                raise ConfigError(
                    f"{name} has no effect: the embedded engine costs nothing; limit it by budget_tokens, or set "
                    "TINKER_API_KEY for the hosted service"
                )
        return FREE
    if given.prefill is not None and given.sample is not None and given.train is not None:
        return Price(given.prefill, given.prefill if given.cached is None else given.cached, given.sample, given.train)
    price = listed_price(config.model) if kind == "hosted" else None
    if price is None and config.budget_usd is not None:
        raise ConfigError(
            f"budget_usd: the price of {config.model} is not known.{similar_model(config.model)} "
            "Set prices.prefill, prices.sample and prices.train, in US dollars per million tokens"
        )
    return price


def listed_price(model: str) -> Price | None:
    """Return what the hosted service asks for a model's tokens; None where the table has no such model."""
    return _table().get(model)


def similar_model(model: str) -> str:
    """Return a hint at a model of the table with a similar name, as ` Did you mean …?`; "" where there is none."""
    return did_you_mean(model, _table())


@cache
def _table() -> dict[str, Price]:
    held: dict[str, dict[str, Any]] = json.loads(files("rlkit.cost").joinpath("prices.json").read_text())["models"]
    return {
        model: Price(row["prefill"], row.get("cached", row["prefill"]), row["sample"], row["train"], row["date"])
        for model, row in held.items()
    }
