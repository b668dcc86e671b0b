"""Secrets of the environment, and credentials in URLs, in text that is shown or kept.

Invariant: the result of `redact` holds no value of a variable with the name of a secret, neither as it is nor as
programs write it: escaped, in a URL, line by line, or in base64, even as a part of the encoded data. A shown URL has no
user, password, query or fragment, which may all be credentials.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from urllib.parse import quote, quote_plus

REDACTED = "***"
SHORTEST_SECRET_CHARS = 6
_SHORTEST_LINE_CHARS = 16
"""Length from which a line of a secret is redacted; shorter lines may be words of other texts."""

_SECRET_PART = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE", re.IGNORECASE)
"""Parts that mark a name as a secret wherever they are: few other words contain them."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_SECRET_WORD = re.compile(r".*creds?|credentials?|.*auth|authorization|private|.*dsns?")
_PASS_WORD = re.compile(r".*pass")
_AFTER_PASSES = frozenset(
    {"at", "count", "fraction", "k", "limit", "mark", "n", "number", "only", "rate", "ratio", "score", "threshold"}
    | {"through"}
)
"""Words behind the PASS of a test or an attempt: PASS_RATE, PASS_AT_K."""

_OTHER_WORDS = frozenset(
    {"bandpass", "bypass", "compass", "encompass", "highpass", "lowpass", "overpass", "sacred", "surpass", "trespass"}
    | {"underpass"}
)
_ABOUT_SECRETS = frozenset(
    {"enabled", "enable", "method", "methods", "mode", "provider", "realm", "required", "scheme", "sock", "type"}
)
"""Last words of names whose values say something about a secret: AUTH_METHOD, SSH_AUTH_SOCK."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[\w.~%-]*)(:\d*)?")
_URL = re.compile(r"\w[\w+.-]*://\S+?(?=['\");:,.]*(?:\s|$))")


@lru_cache(maxsize=1024)  # called for each variable and each text
def is_secret_name(name: str) -> bool:
    """Return whether a variable or field of this name holds a secret.

    KEY, TOKEN, SECRET, PASSWORD, PASSWD and PASSPHRASE count anywhere in the name. PASS, CRED, AUTH, PRIVATE and DSN
    count as words, or as the end of one (SSHPASS, OAUTH), so that PASSES, AUTHOR and COMPASS do not.
    """
    if _SECRET_PART.search(name):
        return True
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[-1] in _ABOUT_SECRETS:
        return False
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if _PASS_WORD.fullmatch(word) and word not in _OTHER_WORDS and following not in _AFTER_PASSES:
            return True
    return any(_SECRET_WORD.fullmatch(word) and word not in _OTHER_WORDS for word in words)


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `text` without the values of the variables that `is_secret_name` names.

    The longest go first, since one secret may be the beginning of another. Short values
    (`TOKENIZERS_PARALLELISM=false`) and paths that exist are words of every other message, not secrets.
    """
    return make_redactor(environ)(text)


def make_redactor(environ: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return `redact` for many texts, which reads the environment only once."""
    forms = _forms(_secrets(os.environ if environ is None else environ))

    def redact_text(text: str) -> str:
        for form in forms:
            text = text.replace(form, REDACTED)
        return text

    return redact_text


def show_url(url: str) -> str:
    """Return a URL without credentials, or a path as it is.

    `***` replaces all behind the scheme if credentials cannot be told from the rest.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    authority, slash, path = re.split("[?#]", rest, maxsplit=1)[0].partition("/")
    host = authority.rpartition("@")[2]
    if _HOST.fullmatch(host) is None:  # a password with a `/`, `?` or `#` that is not encoded
        return f"{scheme}://***"
    return f"{scheme}://{host}{slash}{hide_credentials(path)}"


def hide_credentials(text: str) -> str:
    """Return a text with `show_url` applied to each URL."""
    return _URL.sub(lambda url: show_url(url[0]), text)


def is_malformed_url(url: str) -> bool:
    """Return whether the part of a URL between its scheme and its path has no known form."""
    return show_url(url).endswith("://***")


def _secrets(environ: Mapping[str, str]) -> frozenset[str]:
    values = {value for name, value in environ.items() if is_secret_name(name)}
    return frozenset(
        value
        for value in values
        if len(value) >= SHORTEST_SECRET_CHARS and not os.path.exists(value)  # noqa: PTH110  Path.exists raises for a value too long to be a path
    )


@lru_cache(maxsize=4)
def _forms(secrets: frozenset[str]) -> tuple[str, ...]:
    """Return the forms in which secrets may be written, the longest first."""
    return tuple(sorted({form for secret in secrets for form in _list_forms(secret)}, key=len, reverse=True))


def _list_forms(secret: str) -> Iterator[str]:
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
    """Yield the characters that encode only these bytes, for each of their three possible offsets."""
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + data).decode().rstrip("=")
        shared = 1 if (offset + len(data)) % 3 else 0  # the last character encodes what follows, too
        yield encoded[(0, 2, 3)[offset] : len(encoded) - shared]
