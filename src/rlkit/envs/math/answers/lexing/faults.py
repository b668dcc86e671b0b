"""Why a text cannot be read as an answer.

    NotAnAnswer
    ├── Malformed     brackets that do not match, an operand that is missing, a division by zero: no value at all
    ├── Monstrous     over a limit on length, depth, digits or work
    └── Unreadable    mathematics that this package does not know: somebody else may

None of them leaves the package: they become verdicts, or, for a gold answer, a `GoldError`.
"""

from __future__ import annotations


class NotAnAnswer(ValueError):
    """A text that has no value."""


class Malformed(NotAnAnswer):
    """It means nothing."""


class Monstrous(NotAnAnswer):
    """It is over a limit."""


class Unreadable(NotAnAnswer):
    """It is written in a way that is not known here."""
