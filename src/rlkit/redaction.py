"""Secrets of the environment in text that is shown or kept.

Invariant: no value of a variable whose name says that it is a secret is in what `redact` gives back.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

REDACTED = "***"
SHORTEST_SECRET_CHARS = 6

_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without the values of the variables whose names contain KEY, TOKEN, SECRET or PASSWORD.

    Short values (`TOKENIZERS_PARALLELISM=false`) and paths that exist are words of every other message, not secrets.
    """
    for secret in _secrets(os.environ if environ is None else environ):
        text = text.replace(secret, REDACTED)
    return text


def _secrets(environ: Mapping[str, str]) -> list[str]:
    values = {value for name, value in environ.items() if _SECRET_NAME.search(name)}
    secret = [
        value
        for value in values
        if len(value) >= SHORTEST_SECRET_CHARS and not os.path.exists(value)  # noqa: PTH110  Path.exists raises for a value too long to be a path
    ]
    return sorted(secret, key=len, reverse=True)
