r"""Quantities: an expression with a currency, a unit, a percent or degree sign, or `million`.

Invariant: a unit never changes the meaning of a formula: letters that may be variables are read both ways.
"""

from __future__ import annotations

from rlkit.envs.math.answers.expressions import MAX_LETTERS, ExpressionParser
from rlkit.envs.math.answers.lexing import words
from rlkit.envs.math.answers.lexing.lexemes import Token
from rlkit.envs.math.answers.lexing.parse_errors import MalformedError, UnsupportedError
from rlkit.envs.math.answers.nodes import Builder, Call, Expression, Number, make_integer
from rlkit.envs.math.answers.values import Scalar, Suffix

MAX_RAW_TOKENS = 40  # limit of a quantity whose text is kept
_LOOSE_UNITS = frozenset("h m s g L l V N J W m/s km/h km/hr ft/s mi/h m^2 m^3 m/s^2".split())  # noqa: SIM905  reads better
"""Units that may also be variables."""

_LINKS = frozenset({"per", "of", "square", "sq", "cubic"})
_JOINING = frozenset({"^", "_", "=", "+", "-", "*", "/"})
_BEFORE_UNITS = frozenset({"number", ")", "}", "%", "word", "text", "/"})


def read_quantity(tokens: list[Token], builder: Builder) -> tuple[Scalar, ExpressionParser]:
    """Read a quantity, or raise `ParseError`; return it with the parser, whose attributes describe the notation."""
    raw = words.squeeze("".join(token.text for token in tokens)) if len(tokens) <= MAX_RAW_TOKENS else ""
    size = _unit_start(tokens)
    body = tokens[:size]
    unit, factor, suffix = _parse_suffix(tokens[size:])
    currency = next((at for at, token in enumerate(body[:2]) if token.kind == "currency"), None)
    if currency is not None and (currency == 0 or body[0].kind in ("-", "+")):
        unit = unit or words.parse_unit(body.pop(currency).text)
    if body and body[-1].kind == "%":
        suffix = "%"
        body.pop()
    loose_reading = _read_loosely(body)
    parser = ExpressionParser(body)
    expression = parser.read_sum()
    if parser.at < len(body):
        rest = body[parser.at :]
        text = next((token.text for token in rest if token.kind == "text"), None)
        fault = UnsupportedError if text is None or words.parse_unit(text) is not None else MalformedError
        raise fault(f"{rest[0].text!r} after the answer")
    if suffix != "%" and (angle := _strip_degrees(expression, builder)) is not None:
        expression, suffix = angle, "°"
    if factor != 1:
        expression = builder.multiply((make_integer(factor), expression))
    return Scalar(expression, suffix, unit, raw, loose_reading), parser


def _unit_start(tokens: list[Token]) -> int:
    """Return the index of the words after a value; the length if there are none."""
    end = len(tokens)
    for size in (2, 4):  # the `^2` of `cm^2` and of `cm^{2}`
        if end > size + 1 and tokens[end - size].kind == "^" and tokens[end - size - 1].kind in ("text", "word"):
            end -= size
            break
    start = end
    while start > 0 and _is_unit(tokens, start - 1):
        start -= 1
    if start in (0, end) or tokens[start - 1].kind in _JOINING:
        return len(tokens)
    return start


def _is_unit(tokens: list[Token], at: int) -> bool:
    token = tokens[at]
    if token.kind in ("text", "currency"):
        return True
    if token.kind == "/":
        return at > 1 and tokens[at - 1].kind in ("text", "word") and _is_unit(tokens, at - 1)
    if token.kind != "word" or at == 0:
        return False
    is_word = len(token.text) > MAX_LETTERS or token.text in _LINKS or words.is_measure(token.text)
    return is_word and (tokens[at - 1].kind in _BEFORE_UNITS or tokens[at - 1].text == "π")


def _parse_suffix(tokens: list[Token]) -> tuple[words.Unit | None, int, Suffix]:
    """Return the unit, the factor and the suffix of the words after a value."""
    power = 1
    for at, token in enumerate(tokens):
        if token.kind == "^":
            exponent = "".join(token.text for token in tokens[at + 1 :] if token.kind == "number")
            power = int(exponent) if exponent in ("2", "3") else 1
            tokens = tokens[:at]
            break
    texts = " ".join(token.text.strip() for token in tokens).split()
    factor = 1
    if texts and (multiple := words.parse_scale(texts[0])) is not None:
        factor, texts = multiple, texts[1:]
    suffix: Suffix = ""
    if texts and texts[0].rstrip(".s").lower() == "degree":
        suffix, texts = "°", texts[1:]
    return words.parse_unit(" ".join(texts), power), factor, suffix


def _strip_degrees(expression: Expression, builder: Builder) -> Expression | None:
    """Return the expression before a degree sign at the end, or None."""
    match expression:
        case Call("degrees", (angle,)):
            return angle
        case Call("*", (*factors, Call("degrees", (angle,)))):
            return builder.multiply((*factors, angle))
        case _:
            return None


def _read_loosely(body: list[Token]) -> Scalar | None:
    """Return the number before a possible unit, which may also be a product: `12h`, `10 m/s`, `18 men`."""
    if len(body) < 2 or len(body) > MAX_RAW_TOKENS or body[0].value is None:
        return None
    text = "".join(token.text for token in body[1:])
    is_noun = len(body) == 2 and body[1].kind == "word" and body[1].spaced and len(text) > 2 and text.islower()
    if not is_noun and text not in _LOOSE_UNITS:
        return None
    return Scalar(Number(body[0].value), unit=words.parse_unit(text))
