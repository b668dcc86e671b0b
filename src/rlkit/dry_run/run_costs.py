"""The prices of a run's tokens before it begins, on its own service and on the hosted one.

Invariant: a run is free only where the embedded engine has the weights of its model; nothing here needs a key, and only
weights that are missing are asked for at the hub, whether it can be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlkit.chat.hub import hub_problem
from rlkit.chat.tokenizers import has_weights
from rlkit.config.schema import DEFAULT_MODEL, Config
from rlkit.cost.prices import Price, listed_price, price_of, similar_model
from rlkit.service.connect import ServiceChoice


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a run needs.

    Args:
        name: of the part; the field of the configuration that it belongs to, where there is one.
        status: whether it works.
        detail: what was seen, or why it was not tried.
    """

    name: str
    status: Literal["ok", "failed", "not tried"]
    detail: str


@dataclass(frozen=True, slots=True)
class RunCosts:
    """The prices of a run, and what there is to say of them.

    Args:
        own: on the run's own service; None where it is not known, or where the embedded engine has no weights.
        hosted: on the hosted service, where the run's own is the embedded engine and the price is listed.
        parts: whether weights and prices are known.
    """

    own: Price | None
    hosted: Price | None
    parts: Sequence[Part]


def look_up_costs(config: Config, choice: ServiceChoice, note: Callable[[str], None]) -> RunCosts:
    """Look up the prices, and on this machine the weights.

    Raises:
        ConfigError: a limit in dollars, or prices, cannot have an effect.
    """
    own, model = price_of(config, choice.kind), config.model
    hint = similar_model(model)
    if choice.kind != "engine":
        if own is None:
            remedy = "set prices.prefill, prices.sample and prices.train, in US dollars per million tokens"
            detail = f"no price of {model} is known: {remedy}{'.' + hint if hint else ''}"
            return RunCosts(own, None, [Part("prices", "not tried", detail)])
        return RunCosts(own, None, [_listed(own)] if own.date else [])
    hosted = listed_price(model)
    prices = [] if hosted is None else [_listed(hosted)]
    if model == DEFAULT_MODEL or has_weights(model, note):
        return RunCosts(own, hosted, prices)
    hub = hub_problem()
    detail = (
        f"the weights of {model} are not on this machine, "
        f"{'a run would fetch them from the hub' if hub is None else f'and {hub}'}; the hosted service needs none "
        "here: set TINKER_API_KEY"
    )
    unlisted = Part("prices", "not tried", f"{model} is not in the price table of the hosted service.{hint}")
    return RunCosts(None, hosted, [Part("model", "not tried", detail), *(prices or [unlisted])])


def _listed(price: Price) -> Part:
    return Part(
        "prices",
        "ok",
        f"of the hosted service on {price.date}, for a million tokens: ${price.prefill:g} prefill, "
        f"${price.cached:g} cached, ${price.sample:g} sample, ${price.train:g} train",
    )
