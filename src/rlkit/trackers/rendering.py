"""Numbers of a run as text: rewards, durations, tokens and dollars."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlkit.cost.budget import Spending
from rlkit.cost.estimate import Band, Estimate


def render_number(value: float) -> str:
    """Render two decimals for values from 0.1 to 1000, four significant digits otherwise."""
    return f"{value:.2f}" if 0.1 <= abs(value) < 1000 or value == 0 else f"{value:.4g}"


def render_gain(values: Sequence[float], *, arrow: str = "→") -> str:
    """Render the first and the last value, such as `0.64 → 1.00`, with digits in which they differ."""
    ends = [values[0], values[-1]] if len(values) > 1 else values
    largest = max(map(abs, ends))
    short = ".2f" if largest == 0 or 0.1 <= largest < 1000 else ".2g" if largest < 0.1 else ".4g"
    form = short if len({format(value, short) for value in ends}) == len(set(ends)) else ".4g"
    return f" {arrow} ".join(format(value, form) for value in ends)


def render_duration(seconds: float) -> str:
    """Render `2.1 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def render_estimate(estimate: Estimate) -> str:
    """Render `58,000 to 98,000 tokens, $0.10 to $0.35, 2 h 5 min to 3 h 0 min`."""
    price = [] if estimate.usd is None else [render_band(estimate.usd, render_dollars)]
    duration = [] if estimate.seconds is None else [render_band(estimate.seconds, render_duration)]
    return ", ".join([f"{render_band(estimate.tokens, '{:,.0f}'.format)} tokens", *price, *duration])


def render_spending(spending: Spending) -> str:
    """Render `71,512 tokens, $0.21, 2 h 11 min`."""
    price = [] if spending.usd is None else [render_dollars(spending.usd)]
    return ", ".join([f"{spending.tokens:,} tokens", *price, render_duration(spending.seconds)])


def render_dollars(value: float) -> str:
    """Render dollars and cents, or two significant digits below ten cents."""
    return f"${value:,.2f}" if value >= 0.1 or not value else f"${value:.2g}"


def render_band(band: Band, render: Callable[[float], str]) -> str:
    """Render `2 to 3`, or `2` if both bounds are rendered alike."""
    low, high = render(band.low), render(band.high)
    return low if low == high else f"{low} to {high}"
