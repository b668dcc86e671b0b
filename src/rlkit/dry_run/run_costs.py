"""The prices of a run's tokens before it begins, on its own service and on the hosted one.

Invariant: a run is free only where the embedded engine has the weights of its model; nothing here needs a key, and only
weights that are missing are asked for at the hub, whether it can be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rlkit.chat.hub import hub_problem
from rlkit.chat.tokenizers import has_weights
from rlkit.config.schema import DEFAULT_MODEL, Config
from rlkit.cost.prices import Price, listed_price, price_of, similar_model
from rlkit.service.connect import ServiceChoice


@dataclass(frozen=True, slots=True)
class RunCosts:
    """The prices of a run, and what there is to say of them.

    Args:
        own: on the run's own service; None where it is not known, or where the embedded engine has no weights.
        hosted: on the hosted service, where the run's own is the embedded engine and the price is listed.
        weights_problem: why the embedded engine cannot run the model at once; None where it can, or is not used.
        price: the price that is listed, as a phrase; None where none is.
        price_problem: what is to be done about a price that is not known; None where it is known.
    """

    own: Price | None
    hosted: Price | None = None
    weights_problem: str | None = None
    price: str | None = None
    price_problem: str | None = None

    @classmethod
    def of(cls, config: Config, choice: ServiceChoice, note: Callable[[str], None]) -> Self:
        """Look up the prices, and on this machine the weights.

        Raises:
            ConfigError: a limit in dollars, or prices, cannot have an effect.
        """
        own, model = price_of(config, choice.kind), config.model
        hint = similar_model(model)
        if choice.kind != "engine":
            price = _listed(own) if own is not None and own.date else None
            remedy = "set prices.prefill, prices.sample and prices.train, in US dollars per million tokens"
            problem = f"no price of {model} is known: {remedy}{'.' + hint if hint else ''}" if own is None else None
            return cls(own, price=price, price_problem=problem)
        hosted = listed_price(model)
        price = None if hosted is None else _listed(hosted)
        if model == DEFAULT_MODEL or has_weights(model, note):
            return cls(own, hosted, price=price)
        hub = hub_problem()
        there = "a run would fetch them from the hub" if hub is None else f"and {hub}"
        return cls(
            None,
            hosted,
            weights_problem=(
                f"the weights of {model} are not on this machine, {there}; the hosted service needs none here: "
                "set TINKER_API_KEY"
            ),
            price=price,
            price_problem=f"{model} is not in the price table of the hosted service.{hint}" if hosted is None else None,
        )


def _listed(price: Price) -> str:
    return (
        f"of the hosted service on {price.date}, for a million tokens: ${price.prefill:g} prefill, "
        f"${price.cached:g} cached, ${price.sample:g} sample, ${price.train:g} train"
    )
