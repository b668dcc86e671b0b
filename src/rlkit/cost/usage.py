"""Usage of a Tinker service, and its price.

Invariant: only answered requests count. A price is complete or absent; a listed price has a date.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from operator import add, attrgetter
from typing import Any, Literal

from rlkit.config.schema import Config, PricesConfig
from rlkit.errors import ConfigError, did_you_mean

_MILLION = 1e6


@dataclass(slots=True)
class Usage:
    """Counts of answered requests, and of tokens by kind as the service bills them."""

    requests: int = 0
    prefill_tokens: int = 0  # prompt tokens that the service had to compute
    cached_tokens: int = 0  # prompt tokens from its cache, or computed for another sample of the same request
    sampled_tokens: int = 0  # tokens of completions
    trained_tokens: int = 0  # tokens of the sequences whose gradient was computed
    # US dollars to add to the price of the run's model, because a teacher's tokens have another price.
    other_usd: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(*map(add, _counts(self), _counts(other)))

    @property
    def tokens(self) -> int:
        """Tokens of all kinds."""
        return self.prefill_tokens + self.cached_tokens + self.sampled_tokens + self.trained_tokens

    def add_sampling(self, *, prompt: int, cached: int, completions: list[int]) -> None:
        """Count a sampling request.

        Args:
            cached: prompt tokens that the service found in its cache.
            completions: tokens of each sample; the prompt is computed only for the first sample.
        """
        self.requests += 1
        self.prefill_tokens += prompt - cached
        self.cached_tokens += cached + prompt * (len(completions) - 1)
        self.sampled_tokens += sum(completions)

    def add_training(self, tokens: int) -> None:
        """Count the computation of a gradient."""
        self.requests += 1
        self.trained_tokens += tokens


_counts: Callable[[Usage], tuple[Any, ...]] = attrgetter(*(field.name for field in fields(Usage)))


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for a million tokens of each kind of `Usage`."""

    prefill: float
    cached: float
    sample: float
    train: float
    date: str = ""  # day on which this was the price, as 2026-10-07; "" for a price from the configuration
    teachers: Mapping[str, Price] = field(default_factory=dict[str, "Price"])  # prices of the models of teachers

    def scoring_difference(self, teacher: str, tokens: float, requests: float = 0.0) -> float:
        """Return the US dollars that a teacher's scoring costs more than with this price.

        Args:
            requests: number of requests, each of which samples one token.
        """
        own = self.teachers.get(teacher, self)
        return ((own.prefill - self.prefill) * tokens + (own.sample - self.sample) * requests) / _MILLION

    def usd(self, usage: Usage) -> float:
        """Return the cost of usage: Σ tokens × price / 10⁶, without the storage of checkpoints."""
        return (
            usage.prefill_tokens * self.prefill
            + usage.cached_tokens * self.cached
            + usage.sampled_tokens * self.sample
            + usage.trained_tokens * self.train
        ) / _MILLION + usage.other_usd


FREE = Price(0.0, 0.0, 0.0, 0.0)  # price of the embedded engine


def price_of(config: Config, kind: Literal["hosted", "url", "engine"]) -> Price | None:
    """Return the price of a run's tokens and of its teachers; None if one of them is unknown.

    The embedded engine is free. The price table applies only to the hosted service.

    Raises:
        ConfigError: the configuration sets a limit in dollars, or prices, that cannot have an effect.
    """
    prices, envs = config.prices, (*config.envs, *config.eval.envs)
    run_teachers = {field_name: teacher for name in envs for field_name, teacher in config.find_teachers(name).items()}
    if kind == "engine":
        teacher_prices = {
            f"{field_name}.prices": teacher.prices.prefill for field_name, teacher in run_teachers.items()
        }
        for name, value in {"budget_usd": config.budget_usd, "prices": prices.prefill, **teacher_prices}.items():
            if value is not None:
                raise ConfigError(
                    f"{name} has no effect: the embedded engine costs nothing; limit it by budget_tokens, or set "
                    "TINKER_API_KEY for the hosted service"
                )
        return FREE
    price, teachers = _find_price(config.model, prices, config, "prices", kind), dict[str, Price]()
    for field_name, teacher in run_teachers.items():
        if teacher.model in (None, config.model):
            if teacher.prices.prefill is not None:
                raise ConfigError(f"{field_name}.prices has no effect: the teacher is the run's model; set prices")
            continue
        own = _find_price(teacher.model, teacher.prices, config, f"{field_name}.prices", kind)
        if own is None:
            return None
        if teachers.setdefault(teacher.model, own) != own:
            raise ConfigError(f"{field_name}.prices: another teacher with the model {teacher.model} has other prices")
    return price and replace(price, teachers=teachers)


def _find_price(
    model: str, prices: PricesConfig, config: Config, field_name: str, kind: Literal["hosted", "url"]
) -> Price | None:
    if prices.prefill is not None and prices.sample is not None and prices.train is not None:
        cached = prices.prefill if prices.cached_prefill is None else prices.cached_prefill
        return Price(prices.prefill, cached, prices.sample, prices.train)
    price = hosted_prices().get(model) if kind == "hosted" else None
    if price is None and config.budget_usd is not None:
        raise ConfigError(
            f"budget_usd: the price of {model} is unknown.{did_you_mean(model, hosted_prices())} Set "
            f"{field_name}.prefill, {field_name}.sample and {field_name}.train, in US dollars per million tokens"
        )
    return price


@cache
def hosted_prices() -> Mapping[str, Price]:
    """Return the price of each model on the hosted service."""
    models: dict[str, dict[str, Any]] = json.loads(files("rlkit.cost").joinpath("prices.json").read_text())["models"]
    return {
        model: Price(row["prefill"], row.get("cached", row["prefill"]), row["sample"], row["train"], row["date"])
        for model, row in models.items()
    }
