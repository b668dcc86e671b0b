"""Errors of reading an answer.

    ParseError
    ├── MalformedError      brackets that do not match, a missing operand, a division by zero: no value at all
    ├── LimitError          over a limit on length, depth, digits or work
    └── UnsupportedError    mathematics that this package does not support; math-verify may

None of them leaves the package: they become verdicts, or, for a gold answer, a `GoldError`.
"""

from __future__ import annotations


class ParseError(ValueError):
    """Text without a value."""


class MalformedError(ParseError):
    """Text without a meaning."""


class LimitError(ParseError):
    """Text over a limit."""


class UnsupportedError(ParseError):
    """Text in an unsupported notation."""
