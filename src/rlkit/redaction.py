"""Secrets of the environment in text that is shown or kept.

Invariant: no value of a variable whose name says that it is a secret is in what `redact` gives back, neither as it is
nor as programs write it: escaped, in a URL, line by line, or in base64, also as a part of what was encoded.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from urllib.parse import quote, quote_plus

REDACTED = "***"
SHORTEST_SECRET_CHARS = 6
_SHORTEST_LINE_CHARS = 16
"""Of a secret of several lines; shorter ones may be words of other texts."""

_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without the values of the variables whose names contain KEY, TOKEN, SECRET or PASSWORD.

    Short values (`TOKENIZERS_PARALLELISM=false`) and paths that exist are words of every other message, not secrets.
    """
    for written in _forms(_secrets(os.environ if environ is None else environ)):
        text = text.replace(written, REDACTED)
    return text


def _secrets(environ: Mapping[str, str]) -> frozenset[str]:
    values = {value for name, value in environ.items() if _SECRET_NAME.search(name)}
    return frozenset(
        value
        for value in values
        if len(value) >= SHORTEST_SECRET_CHARS and not os.path.exists(value)  # noqa: PTH110  Path.exists raises for a value too long to be a path
    )


@lru_cache(maxsize=4)
def _forms(secrets: frozenset[str]) -> tuple[str, ...]:
    """How they may be written, the longest first."""
    return tuple(sorted({form for secret in secrets for form in _written(secret)}, key=len, reverse=True))


def _written(secret: str) -> Iterator[str]:
    yield secret
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield repr(secret)[1:-1]
    yield quote(secret)
    yield quote(secret, safe="")
    yield quote_plus(secret)
    if "\n" in secret:
        yield from (line.strip() for line in secret.splitlines() if len(line.strip()) >= _SHORTEST_LINE_CHARS)
    for text in _base64(secret.encode(errors="surrogateescape")):
        yield text
        yield text.translate(str.maketrans("+/", "-_"))


def _base64(data: bytes) -> Iterator[str]:
    """The characters that encode nothing but these bytes, for each place in a group of three that they may begin at."""
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + data).decode().rstrip("=")
        shared = 1 if (before + len(data)) % 3 else 0  # the last character encodes what follows, too
        yield encoded[(0, 2, 3)[before] : len(encoded) - shared]
