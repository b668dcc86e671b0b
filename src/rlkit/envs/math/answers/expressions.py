r"""Recursive descent parser of expressions, without backtracking.

Invariant: each token is read once, and nesting is limited, so that time is linear in the length.

    sum       [+-±] product ([+-±] product)* ((\over | \choose) sum)?
    product   power ((* | / | nothing) power)*        two numbers side by side only as `3!7!`, `2^{3}5`, `1 1/2`
    power     postfix (^ (power | {sum}))?            of `xy^2` only the last letter
    postfix   atom (! | ° | _subscript)*
    atom      number | symbol | (sum) | |sum| | \frac | \sqrt | \binom | function
"""

from __future__ import annotations

from fractions import Fraction

from rlkit.envs.math.answers.lexing.lexemes import Token
from rlkit.envs.math.answers.lexing.notation import FUNCTIONS, ORDINALS
from rlkit.envs.math.answers.lexing.parse_errors import LimitError, MalformedError, UnsupportedError
from rlkit.envs.math.answers.literals import is_power_of_ten, read_proper_fraction
from rlkit.envs.math.answers.nodes import HALF, MINUS_ONE, ONE, PLUS_MINUS, ZERO, Builder, Expression, Number, Symbol

MAX_DEPTH = 40
MAX_LETTERS = 4
"""Maximum number of letters of a word that is read as a product of variables."""

_CLOSING = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}
_STARTS = frozenset(
    ["number", "symbol", "word", "function", "(", "[", "{", "⌊", "⌈", "∞", r"\frac", r"\sqrt", r"\binom"]
)
_END = Token("end", "")
_SIGNS = frozenset("+-±∓")
_BINDING = frozenset({"^", "_", "!", "'"})  # signs that bind to the letter before them
_PRIME = "'"


class ExpressionParser:
    """Parser of the tokens of an expression.

    Args:
        tokens: tokens of the text; the parser replaces a word by its letters.

    Attributes:
        at: index of the next token.
        computed: whether the text has unevaluated arithmetic on literals: `17+25`, but not `-3/4`.
        bare_log: whether it has a logarithm without a base.
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
        """Next token."""
        return self._tokens[self.at] if self.at < len(self._tokens) else _END

    def peek(self, count: int) -> Token:
        """Return the token `count` places after the next one."""
        return self._tokens[self.at + count] if self.at + count < len(self._tokens) else _END

    def accept(self, kind: str) -> bool:
        """Read the next token if it is of a kind, and tell whether it is."""
        if self.token.kind != kind:
            return False
        self.at += 1
        return True

    def expect(self, kind: str) -> None:
        """Read a token of a kind, or raise `MalformedError`."""
        if not self.accept(kind):
            raise MalformedError(f"{kind} is missing")

    def read_sum(self) -> Expression:
        """Read terms with signs between them, or raise `ParseError`."""
        terms = [self._read_term()]
        while self.token.kind in _SIGNS:
            terms.append(self._read_term())
        if sum(isinstance(term, Number) for term in terms) > 1:
            self.computed = True
        value = terms[0] if len(terms) == 1 else self.builder.add(terms)
        kind = self.token.kind
        if kind not in ("over", "choose"):
            return value
        self.at += 1
        self._descend()
        denominator = self.read_sum()  # as in TeX, `value` is everything before the sign in the same braces
        self._depth -= 1
        if kind == "over":
            return self.builder.divide(value, denominator)
        self.computed = True
        return self.builder.call("binomial", (value, denominator))

    def _read_term(self) -> Expression:
        signs: list[Expression] = []
        while (kind := self.token.kind) in _SIGNS:
            self.at += 1
            if kind in ("±", "∓"):
                signs.append(PLUS_MINUS)
            if kind in ("-", "∓"):
                signs.append(MINUS_ONE)
        term = self._read_product()
        return self.builder.multiply((*signs, term)) if signs else term

    def _read_product(self) -> Expression:
        token = self.token
        result = self._read_powers()
        if token.kind == "number" and self._tokens[self.at - 1] is token:
            result = self._read_mixed_number(token, result)
        factors = [result]
        while True:
            kind = self.token.kind
            if kind == "mod":
                self.at += 1
                self.computed = True
                factors = [self.builder.call("mod", (self.builder.multiply(factors), self._read_signed_power()))]
            elif kind == "/":
                self.at += 1
                factors.append(self.builder.power(self._read_divisor(), MINUS_ONE))
            elif kind == "*" or self._starts_factor():
                factors.append(self._read_factor(factors, explicit=self.accept("*")))
            else:
                return self.builder.multiply(factors) if len(factors) > 1 else factors[0]

    def _read_divisor(self) -> Expression:
        """Read the divisor after a slash: both letters in `1/ab`, but only the first one in `1/ab^2`."""
        token = self.token
        if token.kind != "word" or len(token.text) > MAX_LETTERS or self.peek(1).kind in _BINDING:
            return self._read_signed_power()
        self.at += 1
        return self.builder.multiply(Symbol(letter) for letter in token.text)

    def _read_signed_power(self) -> Expression:
        """Read a power with signs before it, as in `3 \\cdot -2`."""
        negative = self._read_minus()
        factor = self._read_powers()
        return self.builder.negate(factor) if negative else factor

    def _read_minus(self) -> bool:
        """Read signs, and tell whether their product is a minus."""
        negative = False
        while self.token.kind in ("+", "-"):
            negative ^= self.token.kind == "-"
            self.at += 1
        return negative

    def _read_factor(self, factors: list[Expression], *, explicit: bool) -> Expression:
        if not explicit and self.token.kind == "number" and self._tokens[self.at - 1].kind not in ("!", "}"):
            raise MalformedError("two numbers side by side")
        right = self._read_signed_power() if explicit else self._read_powers()
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

    def _read_mixed_number(self, token: Token, value: Expression) -> Expression:
        r"""Read a mixed number, `3\frac12` or `3 1/2`."""
        if not token.text.isdecimal() or (fraction := read_proper_fraction(self._tokens, self.at)) is None:
            return value
        value_of_fraction, self.at = fraction
        return self.builder.add((value, Number(value_of_fraction)))

    def _read_powers(self) -> Expression:
        base = self._read_postfix()
        while self.accept("^"):
            base = self._read_power(base)
        return base

    def _read_power(self, base: Expression) -> Expression:
        braced = self.token.kind == "{"
        mark = self.peek(int(braced))
        is_degree = mark.kind in (r"\circ", "°") and (not braced or self.peek(2).kind == "}")
        if is_degree or (mark.kind in ("text", "word") and mark.text.strip().lower() in ORDINALS):
            self.at += 3 if braced else 1
            return self.builder.call("degrees", (base,)) if is_degree else base
        exponent = self._read_exponent()
        if isinstance(base, Number) and isinstance(exponent, Number) and base.value != 10:
            self.computed = self.computed or exponent.value.denominator == 1
        return self.builder.power(base, exponent)

    def _read_exponent(self) -> Expression:
        self._descend()
        negative = self._read_minus()
        exponent = self._read_postfix()
        if self.accept("^"):
            exponent = self._read_power(exponent)
        self._depth -= 1
        return self.builder.negate(exponent) if negative else exponent

    def _read_postfix(self) -> Expression:
        value = self._read_atom()
        while True:
            kind = self.token.kind
            if kind == "!":
                self.at += 1
                self.computed = True
                value = self.builder.call("double factorial" if self.accept("!") else "factorial", (value,))
            elif kind == "°":
                self.at += 1
                value = self.builder.call("degrees", (value,))
            elif kind == _PRIME and isinstance(value, Symbol):
                self.at += 1
                value = Symbol(value.name + _PRIME)
            elif kind == "_" and isinstance(value, Symbol):
                self.at += 1
                value = Symbol(f"{value.name}_{self._read_subscript()}")
            else:
                return value

    def _read_subscript(self) -> str:
        if not self.accept("{"):
            token = self.token
            self.at += 1
            if token.kind not in ("number", "symbol", "word", "text"):
                raise UnsupportedError("a subscript")
            return token.text
        texts: list[str] = []
        while not self.accept("}"):
            if self.token.kind in ("end", "{"):
                raise UnsupportedError("a subscript")
            texts.append(self.token.text)
            self.at += 1
        return ",".join(texts)

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise LimitError(f"nested more than {MAX_DEPTH} deep")

    def _read_atom(self) -> Expression:
        self._descend()
        value = self._read_atom_of(self.token)
        self._depth -= 1
        return value

    def _read_atom_of(self, token: Token) -> Expression:  # noqa: PLR0911  one for each kind of atom
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
                return self._read_bracket(token.kind)
            case "|":
                return self._read_absolute()
            case r"\frac":
                numerator = self._read_atom()
                return self.builder.divide(numerator, self._read_atom())
            case r"\binom":
                self.computed = True
                numerator = self._read_atom()
                return self.builder.call("binomial", (numerator, self._read_atom()))
            case r"\sqrt":
                return self._read_root()
            case "function":
                return self._read_function(token.text)
            case "end" | ")" | "]" | "}" | "+" | "-" | "*" | "/" | "^" | "_" | "=" | ",":
                raise MalformedError("an operand is missing")
            case _:
                raise UnsupportedError(f"{token.text!r}")

    def _read_bracket(self, opening: str) -> Expression:
        bars, self._bars = self._bars, 0
        value = self.read_sum()
        self._bars = bars
        self.expect(_CLOSING[opening])
        if opening in "⌊⌈":
            return self.builder.call("floor" if opening == "⌊" else "ceil", (value,))
        return value

    def _read_absolute(self) -> Expression:
        self._bars += 1
        value = self.read_sum()
        self._bars -= 1
        self.expect("|")
        return self.builder.call("abs", (value,))

    def _read_root(self) -> Expression:
        degree: Expression = HALF
        if self.accept("["):
            degree = self.builder.divide(ONE, self.read_sum())
            self.expect("]")
        value = self._read_atom()
        root = self.builder.power(value, degree)
        if isinstance(root, Number):
            self.computed = True
        return root

    def _read_function(self, name: str) -> Expression:
        exponent: Expression | None = None
        base: Expression | None = None
        while (kind := self.token.kind) in ("^", "_"):
            self.at += 1
            if kind == "^":
                exponent = self._read_exponent()
            else:
                base = self._read_atom()
        is_bracketed = self.token.kind in ("(", "{", "[")
        argument = self._read_postfix() if is_bracketed else self._read_open_argument()
        if exponent == MINUS_ONE and f"arc{name}" in FUNCTIONS:
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
            raise UnsupportedError(f"{name} with a subscript")
        if base == Symbol("e"):
            return self.builder.call("ln", (argument,))
        if base in (ZERO, ONE):
            raise MalformedError("a logarithm to base 0 or 1")
        return self.builder.call("logarithm", (argument, base))

    def _read_open_argument(self) -> Expression:
        r"""Read the argument of `\sin 3x^2`: factors without a sign between them, up to the next function."""
        argument = self._read_signed_power()
        while self._starts_factor() and self.token.kind not in ("function", "number", "("):
            argument = self.builder.multiply((argument, self._read_powers()))
        return argument
