"""Words in answers: units, numbers, phrases.

Invariant: a unit outside of the table is an ordinary word, and ordinary words never conflict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """Measure with its dimension, and its size in the base unit of the dimension."""

    dimension: str
    factor: Fraction


_UNITS = """
length: 1/1000 mm millimeter millimetre, 1/100 cm centimeter centimetre, 1 m meter metre, 1000 km kilometer kilometre
length: 0.0254 in inch inche, 0.3048 ft foot feet, 0.9144 yd yard, 1609.344 mi mile
time: 1 s sec second, 60 min minute, 3600 h hr hour, 86400 day, 604800 week
years: 1 year yr
mass: 1/1000 mg milligram, 1 g gram gm, 1000 kg kilogram
weight: 1 oz ounce, 16 lb pound
volume: 1/1000 ml milliliter millilitre, 1 l liter litre
dollars: 1 dollar usd buck, 1/100 cent
euros: 1 euro eur
pounds sterling: 1 poundsterling gbp quid
yen or yuan: 1 yen jpy yuan cny rmb renminbi
rupees: 1 rupee inr
francs: 1 franc chf
won: 1 won krw
rubles: 1 ruble rouble rub
dollars of Canada: 1 canadiandollar cad
dollars of Australia: 1 australiandollar aud
length per time: 0.44704 mph, 5/18 kmh kph
units: 1 unit
Fahrenheit: 1 fahrenheit
Celsius: 1 celsius centigrade
radians: 1 rad radian
hours before noon: 1 am
hours after noon: 1 pm
"""
"""Measures by dimension: the size, and the names in the singular."""
_MONTHS = "january february march april may june july august september october november december".split()  # noqa: SIM905  reads better

UNITS: Mapping[str, Unit] = {
    name: Unit(dimension, Fraction(factor))
    for dimension, _, measures in (line.partition(": ") for line in _UNITS.strip().splitlines())
    for factor, *names in map(str.split, measures.split(", "))
    for name in names
} | {month: Unit(f"days of {month}", Fraction(1)) for month in _MONTHS}
"""Measures by name, in the singular."""

_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cubed": 3, "squared": 2}

_CURRENCY_SIGNS = {
    "dollar": r"$ \$ \textdollar", "euro": r"€ \euro \texteuro \EUR", "pound sterling": r"£ \pounds \textsterling",
    "yen": r"¥ \yen \textyen", "rupee": r"₹ \rupee", "won": "₩", "ruble": "₽", "cent": r"¢ \cent \cents \textcent",
}  # fmt: skip
CURRENCIES: Mapping[str, str] = {sign: name for name, signs in _CURRENCY_SIGNS.items() for sign in signs.split()}
"""Currencies by sign or command."""

TEMPERATURES: Mapping[str, str] = {"F": "fahrenheit", "C": "celsius"}
"""Scales by the letter after a degree sign."""

CURRENCY_CODES = frozenset("USD EUR GBP JPY CNY RMB INR CHF KRW RUB CAD AUD".split())  # noqa: SIM905  reads better

EMPTY_SETS = frozenset("nosolution nosolutions norealsolution norealsolutions emptyset none nullset".split())  # noqa: SIM905  reads better
ALL_REALS = frozenset({"allrealnumbers", "allreals", "realnumbers", "allrealx", "setofallrealnumbers", "reals"})
"""Phrases for the empty set and for all real numbers, as `squeeze` returns them."""

LEAD_INS = (
    "the final answer is", "final answer is", "the correct answer is", "the answer is", "final answer",
    "correct answer", "answer is", "answer", "therefore", "thus", "so", "hence", "option", "choice",
)  # fmt: skip
"""Phrases before an answer; none is a prefix of a later one."""

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "ten twenty thirty forty fifty sixty seventy eighty ninety"
_COUNTS: Mapping[str, int] = {word: 10 * value for value, word in enumerate(_TENS.split(), start=1)} | {
    word: value for value, word in enumerate(_SMALL.split())
}
_MULTIPLES: Mapping[str, int] = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES: Mapping[str, int] = {"hundred": 100, **_MULTIPLES}
_MAX_NUMBER_WORDS = 16

_ALTERING = frozenset(
    "or and not but except than least most plus minus divided factorial half halves squared cubed negative".split()  # noqa: SIM905  reads better
)
_DIGITS = re.compile(r"(?<![A-Za-z])[0-9]")
_WORDS = re.compile(r"[a-z]+(?:-[a-z]+)*")

_ARTICLES = ("the ", "an ", "a ")


def squeeze(text: str) -> str:
    """Return the text in lower case, reduced to letters, digits, and the points and signs between digits."""
    lower = text.lower().strip()
    for article in _ARTICLES:
        lower = lower.removeprefix(article)
    return "".join(char for char in lower if char.isalnum() or char in ":.-+/").replace(".m", "m").strip(".:")


def parse_unit(text: str, power: int = 1) -> Unit | None:
    """Return the measure that a text names, to a power, or None; `square cm` equals `cm` with power 2."""
    words = text.lower().replace(".", " ").replace("/", " per ").split()
    if words.count("per") == 1:
        split_at = words.index("per")
        top, bottom = (parse_unit(" ".join(part)) for part in (words[:split_at], words[split_at + 1 :]))
        if top is None or bottom is None:
            return None
        return _raise_unit(Unit(f"{top.dimension} per {bottom.dimension}", top.factor / bottom.factor), power)
    for word in [*words]:
        if word in _POWERS:
            power *= _POWERS[word]
            words.remove(word)
    name = "".join(words)
    unit = UNITS.get(name) or UNITS.get(name.removesuffix("s"))
    if unit is None and len(words) > 1:
        unit = UNITS.get(words[0].removesuffix("s") + "s" + "".join(words[1:]))
    return None if unit is None else _raise_unit(unit, power)


def _raise_unit(unit: Unit, power: int) -> Unit:
    return unit if power == 1 else Unit(f"{unit.dimension} to the power of {power}", unit.factor**power)


def compare_dimensions(first: Unit, second: Unit) -> bool | None:
    """Tell whether two measures may be compared; None if undecided: dollars, and dollars of Canada."""
    if first.dimension == second.dimension:
        return True
    are_dollars = all(unit.dimension.startswith("dollars") for unit in (first, second))
    return None if are_dollars and first.factor == second.factor else False


def are_pounds(first: Unit | None, second: Unit | None) -> bool:
    """Tell whether one unit is the pound sterling and the other is `pound`, which is the currency or the weight."""
    return {first, second} == {UNITS["pound"], UNITS["poundsterling"]}


def parse_scale(text: str) -> int | None:
    """Return the factor of a word such as `million`, or None."""
    return _SCALES.get(text.strip().lower())


def alters_value(text: str, *, leading: bool = False) -> bool:
    """Tell whether words beside a value may change it, unlike a unit: `or 6`, `at least`, `squared`.

    Args:
        leading: whether they precede the value, which is in the text as well.
    """
    if parse_unit(text) is not None:
        return False
    return (not leading and _DIGITS.search(text) is not None) or not _ALTERING.isdisjoint(_WORDS.findall(text.lower()))


def is_measure(text: str) -> bool:
    """Tell whether the text is a unit or a factor such as `million`."""
    return parse_unit(text) is not None or parse_scale(text) is not None


def parse_number(text: str) -> int | None:
    """Return the number that English words spell, `twenty-one`, `two hundred and five`, or None."""
    words = text.lower().replace("-", " ").split()
    if not words or len(words) > _MAX_NUMBER_WORDS or words[0] == "and":
        return None
    total = group = 0
    for word in words:
        if word in _COUNTS:
            group += _COUNTS[word]
        elif word == "hundred" and 0 < group < 10:
            group *= 100
        elif word in _MULTIPLES and group:
            total += group * _MULTIPLES[word]
            group = 0
        elif word != "and":
            return None
    return total + group
