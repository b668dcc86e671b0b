r"""One expression with what stands around it: a currency, a unit, a percent or degree sign, `million`.

Invariant: a unit never changes what a formula means: letters that may be variables are read both ways.
"""

from __future__ import annotations

from rlkit.envs.math.answers.expressions import ExpressionParser
from rlkit.envs.math.answers.lexing import words
from rlkit.envs.math.answers.lexing.faults import Malformed, Unreadable
from rlkit.envs.math.answers.lexing.lexer import Token
from rlkit.envs.math.answers.nodes import Builder, Call, Expression, Number, Product, number
from rlkit.envs.math.answers.values import Scalar, Suffix

MAX_RAW_TOKENS = 40
"""The text of what is longer is not kept."""

_LOOSE_UNITS = frozenset("h m s g L l V N J W m/s km/h km/hr ft/s mi/h m^2 m^3 m/s^2".split())  # noqa: SIM905  reads better
"""Units that may as well be variables."""

_LINKS = frozenset({"per", "of", "square", "sq", "cubic"})
_JOINING = frozenset({"^", "_", "=", "+", "-", "*", "/"})
_BEFORE_UNITS = frozenset({"number", ")", "}", "%", "word", "text", "/"})
_MAX_VARIABLES = 4
"""A longer word is no product of variables."""


def read_quantity(found: list[Token], builder: Builder) -> tuple[Scalar, ExpressionParser]:
    """Read one expression and what stands around it, or raise `NotAnAnswer`.

    Returns the value, and the parser, which tells what it noticed.
    """
    raw = words.squeezed("".join(token.text for token in found)) if len(found) <= MAX_RAW_TOKENS else ""
    size = _unit_start(found)
    body = found[:size]
    unit, factor, suffix = _trailing(found[size:])
    currency = next((at for at, token in enumerate(body[:2]) if token.kind == "currency"), None)
    if currency is not None and (currency == 0 or body[0].kind in ("-", "+")):
        unit = unit or words.unit(body.pop(currency).text)
    if body and body[-1].kind == "%":
        suffix = "%"
        body.pop()
    loose = _loose(body)
    parser = ExpressionParser(body)
    expression = parser.sum()
    if parser.at < len(body):
        rest = body[parser.at :]
        text = next((token.text for token in rest if token.kind == "text"), None)
        fault = Unreadable if text is None or words.unit(text) is not None else Malformed
        raise fault(f"{rest[0].text!r} where the answer should end")
    if suffix != "%" and (angle := _degrees(expression, builder)) is not None:
        expression, suffix = angle, "°"
    if factor != 1:
        expression = builder.multiply((number(factor), expression))
    return Scalar(expression, suffix, unit, raw, loose), parser


def _unit_start(found: list[Token]) -> int:
    """Where the words behind a value begin; the length where there are none."""
    end = len(found)
    for size in (2, 4):  # the `^2` of `cm^2` and of `cm^{2}`
        if end > size + 1 and found[end - size].kind == "^" and found[end - size - 1].kind in ("text", "word"):
            end -= size
            break
    start = end
    while start > 0 and _is_unit(found, start - 1):
        start -= 1
    if start in (0, end) or found[start - 1].kind in _JOINING:
        return len(found)
    return start


def _is_unit(found: list[Token], at: int) -> bool:
    token = found[at]
    if token.kind in ("text", "currency"):
        return True
    if token.kind == "/":
        return at > 1 and found[at - 1].kind in ("text", "word") and _is_unit(found, at - 1)
    if token.kind != "word" or at == 0:
        return False
    known = len(token.text) > _MAX_VARIABLES or token.text in _LINKS or words.is_measure(token.text)
    return known and (found[at - 1].kind in _BEFORE_UNITS or found[at - 1].text == "π")


def _trailing(found: list[Token]) -> tuple[words.Unit | None, int, Suffix]:
    """The unit, the multiple and the suffix that the words behind a value stand for."""
    power = 1
    for at, token in enumerate(found):
        if token.kind == "^":
            exponent = "".join(token.text for token in found[at + 1 :] if token.kind == "number")
            power = int(exponent) if exponent in ("2", "3") else 1
            found = found[:at]
            break
    texts = " ".join(token.text.strip() for token in found).split()
    factor = 1
    if texts and (multiple := words.scale(texts[0])) is not None:
        factor, texts = multiple, texts[1:]
    suffix: Suffix = ""
    if texts and texts[0].rstrip(".s").lower() == "degree":
        suffix, texts = "°", texts[1:]
    return words.unit(" ".join(texts), power), factor, suffix


def _degrees(expression: Expression, builder: Builder) -> Expression | None:
    """What stands before the degree sign at an expression's end."""
    match expression:
        case Call("degrees", (angle,)):
            return angle
        case Product((*factors, Call("degrees", (angle,)))):
            return builder.multiply((*factors, angle))
        case _:
            return None


def _loose(body: list[Token]) -> Scalar | None:
    """A number with what may be a unit or a product of variables, as the number alone: `12h`, `10 m/s`, `18 men`."""
    if len(body) < 2 or len(body) > MAX_RAW_TOKENS or body[0].value is None:
        return None
    written = "".join(token.text for token in body[1:])
    word = len(body) == 2 and body[1].kind == "word" and body[1].spaced and len(written) > 2 and written.islower()
    if not word and written not in _LOOSE_UNITS:
        return None
    return Scalar(Number(body[0].value), unit=words.unit(written))
