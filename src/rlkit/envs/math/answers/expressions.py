r"""From tokens to an expression: a recursive descent that never goes back.

Invariant: each token is read once, and nesting is limited, so that time is in proportion to length.

    sum       [+-±] product ([+-±] product)* ((\over | \choose) sum)?
    product   power ((* | / | nothing) power)*        two numbers side by side only as `3!7!`, `2^{3}5`, `1 1/2`
    power     postfix (^ (power | {sum}))?            of `xy^2` only the last letter
    postfix   atom (! | ° | _subscript)*
    atom      number | symbol | (sum) | |sum| | \frac | \sqrt | \binom | function
"""

from __future__ import annotations

from fractions import Fraction

from rlkit.envs.math.answers.lexing.faults import Malformed, Monstrous, Unreadable
from rlkit.envs.math.answers.lexing.lexer import Token
from rlkit.envs.math.answers.literals import is_power_of_ten, proper_fraction
from rlkit.envs.math.answers.nodes import (
    HALF,
    MINUS_ONE,
    ONE,
    PLUS_MINUS,
    ZERO,
    Builder,
    Call,
    Expression,
    Number,
    Symbol,
)

MAX_DEPTH = 40
MAX_LETTERS = 4
"""A word of more letters is no product of variables."""

_CLOSING = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}
_STARTS = frozenset(
    ["number", "symbol", "word", "function", "(", "[", "{", "⌊", "⌈", "∞", r"\frac", r"\sqrt", r"\binom"]
)
_END = Token("end", "")
_SIGNS = frozenset("+-±∓")
_BINDING = frozenset({"^", "_", "!", "'"})
"""Signs that belong to the last letter before them."""

_PRIME = "'"


class ExpressionParser:
    """Reads expressions from tokens.

    Args:
        tokens: all tokens of the text; in the place of a word come its letters.

    Attributes:
        at: the token that is read next.
        computed: whether arithmetic on literals was written out: `17+25`, but not `-3/4`.
        bare_log: whether there is a logarithm without a base.
    """

    def __init__(self, tokens: list[Token]) -> None:
        self.at = 0
        self.computed = False
        self.bare_log = False
        self.builder = Builder()
        self._tokens = tokens
        self._depth = 0
        self._bars = 0

    @property
    def token(self) -> Token:
        """The token that is read next."""
        return self._tokens[self.at] if self.at < len(self._tokens) else _END

    def ahead(self, count: int) -> Token:
        """A token further on."""
        return self._tokens[self.at + count] if self.at + count < len(self._tokens) else _END

    def take(self, kind: str) -> bool:
        """Whether the next token is of the kind; it is read then."""
        if self.token.kind != kind:
            return False
        self.at += 1
        return True

    def need(self, kind: str) -> None:
        """Read a token that must be there, or raise `Malformed`."""
        if not self.take(kind):
            raise Malformed(f"{kind} is missing")

    def sum(self) -> Expression:
        """Read terms with signs between them, or raise `NotAnAnswer`."""
        terms = [self._signed()]
        while self.token.kind in _SIGNS:
            terms.append(self._signed())
        if sum(isinstance(term, Number) for term in terms) > 1:
            self.computed = True
        value = terms[0] if len(terms) == 1 else self.builder.add(terms)
        kind = self.token.kind
        if kind not in ("over", "choose"):
            return value
        self.at += 1
        self._deeper()
        below = self.sum()  # of all that stands before the sign in its braces, as TeX has it
        self._depth -= 1
        if kind == "over":
            return self.builder.divide(value, below)
        self.computed = True
        return self.builder.call("binomial", (value, below))

    def _signed(self) -> Expression:
        signs: list[Expression] = []
        while (kind := self.token.kind) in _SIGNS:
            self.at += 1
            if kind in ("±", "∓"):
                signs.append(PLUS_MINUS)
            if kind in ("-", "∓"):
                signs.append(MINUS_ONE)
        term = self._product()
        return self.builder.multiply((*signs, term)) if signs else term

    def _product(self) -> Expression:
        token = self.token
        result = self._power()
        if token.kind == "number" and self._tokens[self.at - 1] is token:
            result = self._mixed(token, result)
        factors = [result]
        while True:
            kind = self.token.kind
            if kind == "mod":
                self.at += 1
                self.computed = True
                factors = [self.builder.call("mod", (self.builder.multiply(factors), self._factor()))]
            elif kind == "/":
                self.at += 1
                factors.append(self.builder.power(self._divisor(), MINUS_ONE))
            elif kind == "*" or self._starts_factor():
                factors.append(self._multiplied(factors, explicit=self.take("*")))
            else:
                return self.builder.multiply(factors) if len(factors) > 1 else factors[0]

    def _divisor(self) -> Expression:
        """What follows a slash: of `1/ab` both letters, but of `1/ab^2` only the first, as in a product."""
        token = self.token
        if token.kind != "word" or len(token.text) > MAX_LETTERS or self.ahead(1).kind in _BINDING:
            return self._factor()
        self.at += 1
        return self.builder.multiply(Symbol(letter) for letter in token.text)

    def _factor(self) -> Expression:
        """A power with signs before it, as in `3 \\cdot -2`."""
        negative = self._takes_minus()
        factor = self._power()
        return self.builder.negate(factor) if negative else factor

    def _takes_minus(self) -> bool:
        """Read signs, and tell whether they come to a minus."""
        negative = False
        while self.token.kind in ("+", "-"):
            negative ^= self.token.kind == "-"
            self.at += 1
        return negative

    def _multiplied(self, factors: list[Expression], *, explicit: bool) -> Expression:
        if not explicit and self.token.kind == "number" and self._tokens[self.at - 1].kind not in ("!", "}"):
            raise Malformed("two numbers side by side")
        right = self._factor() if explicit else self._power()
        if isinstance(right, Number) and not is_power_of_ten(right.value):
            self.computed = self.computed or any(isinstance(factor, Number) for factor in factors)
        return right

    def _starts_factor(self) -> bool:
        token = self.token
        if token.kind == "|":
            return self._bars == 0
        if token.kind == "word":
            return len(token.text) <= MAX_LETTERS
        return token.kind in _STARTS

    def _mixed(self, whole: Token, value: Expression) -> Expression:
        r"""`3\frac12` and `3 1/2`: a whole number with a proper fraction right after it."""
        if not whole.whole or (fraction := proper_fraction(self._tokens, self.at)) is None:
            return value
        part, self.at = fraction
        return self.builder.add((value, Number(part)))

    def _power(self) -> Expression:
        base = self._postfix()
        while self.take("^"):
            base = self._raised(base)
        return base

    def _raised(self, base: Expression) -> Expression:
        if self.take(r"\circ") or self.take("°"):
            return Call("degrees", (base,))
        if self.token.kind == "{" and self.ahead(1).kind in (r"\circ", "°") and self.ahead(2).kind == "}":
            self.at += 3
            return Call("degrees", (base,))
        if self._ordinal():
            return base
        exponent = self._exponent()
        if isinstance(base, Number) and isinstance(exponent, Number) and base.value != 10:
            self.computed = self.computed or exponent.value.denominator == 1
        return self.builder.power(base, exponent)

    def _exponent(self) -> Expression:
        self._deeper()
        negative = self._takes_minus()
        exponent = self._postfix()
        if self.take("^"):
            exponent = self._raised(exponent)
        self._depth -= 1
        return self.builder.negate(exponent) if negative else exponent

    def _ordinal(self) -> bool:
        """The `th` of `12^{th}`, which changes nothing."""
        braced = self.token.kind == "{"
        token = self.ahead(int(braced))
        if token.kind not in ("text", "word") or token.text.strip().lower() not in ("th", "st", "nd", "rd"):
            return False
        self.at += 3 if braced else 1
        return True

    def _postfix(self) -> Expression:
        value = self._atom()
        while True:
            kind = self.token.kind
            if kind == "!":
                self.at += 1
                self.computed = True
                value = self.builder.call("double factorial" if self.take("!") else "factorial", (value,))
            elif kind == "°":
                self.at += 1
                value = Call("degrees", (value,))
            elif kind == _PRIME and isinstance(value, Symbol):
                self.at += 1
                value = Symbol(value.name + _PRIME)
            elif kind == "_" and isinstance(value, Symbol):
                self.at += 1
                value = Symbol(f"{value.name}_{self._subscript()}")
            else:
                return value

    def _subscript(self) -> str:
        if not self.take("{"):
            token = self.token
            self.at += 1
            if token.kind not in ("number", "symbol", "word", "text"):
                raise Unreadable("a subscript")
            return token.text
        written: list[str] = []
        while not self.take("}"):
            if self.token.kind in ("end", "{"):
                raise Unreadable("a subscript")
            written.append(self.token.text)
            self.at += 1
        return ",".join(written)

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Monstrous(f"nested more than {MAX_DEPTH} deep")

    def _atom(self) -> Expression:
        self._deeper()
        value = self._atom_of(self.token)
        self._depth -= 1
        return value

    def _atom_of(self, token: Token) -> Expression:  # noqa: PLR0911  one for each kind of atom
        self.at += 1
        match token.kind:
            case "number":
                return Number(token.value or Fraction(0))
            case "symbol":
                return Symbol(token.text)
            case "∞":
                return Symbol("∞")
            case "word" if len(token.text) <= MAX_LETTERS:
                self._tokens[self.at - 1 : self.at] = [Token("symbol", letter) for letter in token.text]
                return Symbol(token.text[0])
            case "(" | "[" | "{" | "⌊" | "⌈":
                return self._bracket(token.kind)
            case "|":
                return self._absolute()
            case r"\frac":
                above = self._atom()
                return self.builder.divide(above, self._atom())
            case r"\binom":
                self.computed = True
                above = self._atom()
                return self.builder.call("binomial", (above, self._atom()))
            case r"\sqrt":
                return self._root()
            case "function":
                return self._function(token.text)
            case "end" | ")" | "]" | "}" | "+" | "-" | "*" | "/" | "^" | "_" | "=" | ",":
                raise Malformed("an operand is missing")
            case _:
                raise Unreadable(f"{token.text!r}")

    def _bracket(self, opening: str) -> Expression:
        bars, self._bars = self._bars, 0
        value = self.sum()
        self._bars = bars
        self.need(_CLOSING[opening])
        if opening in "⌊⌈":
            return self.builder.call("floor" if opening == "⌊" else "ceil", (value,))
        return value

    def _absolute(self) -> Expression:
        self._bars += 1
        value = self.sum()
        self._bars -= 1
        self.need("|")
        return self.builder.call("abs", (value,))

    def _root(self) -> Expression:
        degree: Expression = HALF
        if self.take("["):
            degree = self.builder.divide(ONE, self.sum())
            self.need("]")
        value = self._atom()
        root = self.builder.power(value, degree)
        if isinstance(root, Number):
            self.computed = True
        return root

    def _function(self, name: str) -> Expression:
        exponent: Expression | None = None
        base: Expression | None = None
        while (kind := self.token.kind) in ("^", "_"):
            self.at += 1
            if kind == "^":
                exponent = self._exponent()
            else:
                base = self._atom()
        grouped = self.token.kind in ("(", "{", "[")
        argument = self._postfix() if grouped else self._open_argument()
        if exponent == MINUS_ONE and f"arc{name}" in _INVERSES:
            name, exponent = f"arc{name}", None
        value = self._apply(name, base, argument)
        return value if exponent is None else self.builder.power(value, exponent)

    def _apply(self, name: str, base: Expression | None, argument: Expression) -> Expression:
        if name == "exp" and base is None:
            return self.builder.power(Symbol("e"), argument)
        if base is None:
            self.bare_log = self.bare_log or name == "log"
            return self.builder.call(name, (argument,))
        if name != "log":
            raise Unreadable(f"{name} with a subscript")
        if base == Symbol("e"):
            return Call("ln", (argument,))
        if base in (ZERO, ONE):
            raise Malformed("a logarithm to base 0 or 1")
        return Call("logarithm", (argument, base))

    def _open_argument(self) -> Expression:
        r"""The argument of `\sin 3x^2`: what is multiplied without a sign, up to the next function."""
        argument = self._factor()
        while self._starts_factor() and self.token.kind not in ("function", "number", "("):
            argument = self.builder.multiply((argument, self._power()))
        return argument


_INVERSES = frozenset({"arcsin", "arccos", "arctan", "arccot"})
