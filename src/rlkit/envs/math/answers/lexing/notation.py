r"""Tables of the lexer: commands, signs and words of LaTeX, ASCII and Unicode.

Invariant: data only.
"""

from __future__ import annotations

_GREEK_SIGNS = "αβγδεζηθικλμνξπρστυφχψωϕϑΓΔΘΛΞΠΣΦΨΩ"
_GREEK_NAMES = (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi",
    "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "phi", "theta", "Gamma", "Delta", "Theta",
    "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega",
)  # fmt: skip
UNICODE = str.maketrans(
    {sign: rf"\{name} " for sign, name in zip(_GREEK_SIGNS, _GREEK_NAMES, strict=True)}
    | {
        "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/",
        "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv ",
        "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∖": r"\setminus ", "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
        "±": r"\pm ", "∓": r"\mp ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "°": r"^\circ ",
        "∠": r"\angle ", "∡": r"\angle ", "‖": r"\|", "∥": r"\|",
        "º": r"^\circ ", "⁄": "/", "∕": "/", "∆": r"\Delta ", "→": r"\to ", "∧": r"\land ", "∨": r"\lor ",
        "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "⟨": r"\langle ", "⟩": r"\rangle ",
        "…": r"\dots ", "′": "'", "’": "'", "½": r"\frac12 ", "⅓": r"\frac13 ", "⅔": r"\frac23 ", "¼": r"\frac14 ",
        "¾": r"\frac34 ", "⅕": r"\frac15 ", "⅖": r"\frac25 ", "⅗": r"\frac35 ", "⅘": r"\frac45 ", "⅙": r"\frac16 ",
        "⅚": r"\frac56 ", "⅛": r"\frac18 ", "⅜": r"\frac38 ", "⅝": r"\frac58 ", "⅞": r"\frac78 ",
    }
)  # fmt: skip

_LAYOUT = (
    r"\displaystyle \textstyle \limits \scriptstyle \quad \qquad \, \; \! \: \> \( \) \[ \] \mathbf \boldsymbol \bm "
    r"\mathit \underline \boxed \fbox \hbox \triangle \mathsf \vec \overrightarrow \bf \it \rm \nolimits \Large \large "
    r"\small \hline \tiny \thinspace \enspace \mathstrut \therefore \hat \tilde \widehat \mathcal"
)
DROPPED = frozenset({*_LAYOUT.split(), r"\ "})
TEXTS = frozenset(
    r"\text \textbf \textit \textrm \mbox \mathrm \operatorname \texttt \textsf \textup \emph".split()  # noqa: SIM905  reads better
)
FRACTIONS = {
    **{rf"\{prefix}frac": r"\frac" for prefix in ("", "d", "t", "c", "s", "nice")},
    **{rf"\{prefix}binom": r"\binom" for prefix in ("", "d", "t")},
}
ALIASES = {
    r"\cdot": "*", r"\times": "*", r"\ast": "*", r"\div": "/", r"\over": "over", "**": "^", "==": "=",
    r"\le": "≤", r"\leq": "≤", r"\leqslant": "≤", "<=": "≤", r"\ge": "≥", r"\geq": "≥", r"\geqslant": "≥", ">=": "≥",
    r"\lt": "<", r"\gt": ">", r"\ne": "≠", r"\neq": "≠", "!=": "≠", r"\equiv": "=", r"\approx": "≈", r"\sim": "≈",
    r"\simeq": "≈", r"\cong": "≈", r"\pm": "±", r"\mp": "∓", r"\%": "%", r"\lvert": "|", r"\rvert": "|", r"\vert": "|",
    r"\mid": "|", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\langle": "(", r"\rangle": ")", r"\lbrack": "[",
    r"\rbrack": "]", r"\lparen": "(", r"\rparen": ")", r"\\": "row", r"\cr": "row", "&": "cell", r"\degree": "°",
    r"\degrees": "°", r"\cup": "∪", r"\bigcup": "∪", r"\cap": "∩", r"\setminus": "∖", r"\backslash": "∖", r"\in": "∈",
    r"\infty": "∞", r"\emptyset": "∅", r"\varnothing": "∅", r"\bmod": "mod", r"\colon": ":", r"\land": "and",
    r"\lor": "or", r"\wedge": "and", r"\vee": "or", r"\neg": "not", r"\prime": "'", r"\lfloor": "⌊", r"\rfloor": "⌋",
    r"\lceil": "⌈", r"\rceil": "⌉", r"\choose": "choose", r"\implies": "unknown", r"\to": "unknown", r"\|": "‖",
    r"\lVert": "‖", r"\rVert": "‖", r"\Vert": "‖", "+/-": "±", r"\sqrt": r"\sqrt", r"\pmod": r"\pmod", r"\{": r"\{",
    r"\}": r"\}", r"\circ": r"\circ",
}  # fmt: skip
FUNCTIONS = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "exp", "ln", "log", "abs", "floor", "ceil")},
    **{name: name for name in ("sinh", "cosh", "tanh", "coth", "arcsin", "arccos", "arctan", "arccot")},
    **{f"a{name}": f"arc{name}" for name in ("sin", "cos", "tan")},
    "lg": "log",
}  # fmt: skip
_GREEK_VARIANTS = ("varepsilon", "vartheta", "varphi", "ell", "hbar", "imath", "Re", "Im")
GREEK = {name: name for name in (*_GREEK_NAMES, *_GREEK_VARIANTS)} | {"pi": "π", "varpi": "π"}
"""Symbols by name."""

PLAIN = frozenset("+-*/^_!=<>,;:|()[]{}'%°")
WORDS = {"oo": "∞", "inf": "∞", "infty": "∞", "infinity": "∞", "Infinity": "∞", "or": "or", "and": "and", "mod": "mod"}
WORDS_IN_ANY_CASE = {"sqrt": r"\sqrt", "percent": "%", "degree": "°", "degrees": "°", "union": "∪", "to": ":"}
TEXT_SIGNS = {
    "and": "and", ", and": "and", "or": "or", ", or": "or", "and/or": "or", "to": ":", "%": "%", r"\%": "%",
    "percent": "%",
}  # fmt: skip
"""Signs by the text that stands for them, as in `\\text{ or }`."""

ORDINALS = ("th", "st", "nd", "rd")
ENVIRONMENTS = frozenset({"pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"})
ELLIPSES = frozenset({r"\dots", r"\ldots", r"\cdots", r"\dotsc", r"\dotsb", r"\dotsm", r"\dotso"})
NAMES = frozenset("gcd lcm max min det deg dim ker arg sup inf rank tr Var Cov Pr".split())  # noqa: SIM905  reads better
r"""Functions that are labels of a value, as in `\gcd(4,6) = 2`, and are never evaluated."""

SKIPPED = frozenset(r"\color \textcolor \phantom \hphantom \vphantom \hspace \vspace \tag".split())  # noqa: SIM905  reads better
"""Commands whose first argument is layout."""
