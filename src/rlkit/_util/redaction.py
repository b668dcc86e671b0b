"""Redact secrets (environment variables) and URL credentials from text that is displayed or stored.

Invariant: the result of `redact` contains no value of a secret variable (`is_secret_name`), plain or encoded (escaped,
URL-encoded, line by line, base64 at any offset), except values that are very short or existing paths. A
displayed URL has no user, password, query or fragment, because each may be a credential.
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
"""Minimum length of a secret; a shorter value is a setting, such as `auth: basic`."""
_SHORTEST_LINE_CHARS = 16
"""Lines of a multi-line secret are also redacted separately from this length; shorter lines may occur elsewhere."""

_SECRET_PART = re.compile("KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE", re.IGNORECASE)
"""Substrings that mark a name as secret at any position; ordinary words rarely contain them."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_SECRET_WORD = re.compile(r".*creds?|credentials?|.*auth|authorization|private|.*dsns?")
_WORDS_AFTER_TEST_PASS = frozenset(
    {"at", "count", "fraction", "k", "limit", "mark", "n", "number", "only", "rate", "ratio", "score", "threshold"}
    | {"through"}
)
"""Words that follow PASS if it means a passed test: PASS_RATE, PASS_AT_K."""

_NOT_SECRET_WORDS = frozenset(
    {"bandpass", "bypass", "compass", "encompass", "highpass", "lowpass", "overpass", "sacred", "surpass", "trespass"}
    | {"underpass"}
)
"""Words that end like a secret's name but do not denote a secret."""

_SECRET_METADATA_WORDS = frozenset(
    {"enabled", "enable", "method", "methods", "mode", "provider", "realm", "required", "scheme", "sock", "type"}
)
"""Last words of names that describe a secret but do not contain it: AUTH_METHOD, SSH_AUTH_SOCK."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[\w.~%-]*)(:\d*)?")
_URL = re.compile(r"\w[\w+.-]*://\S+?(?=['\");:,.]*(?:\s|$))")


@lru_cache(maxsize=1024)  # called for each variable and each text
def is_secret_name(name: str) -> bool:
    """Return whether a variable or field of this name holds a secret.

    KEY, TOKEN, SECRET, PASSWORD, PASSWD and PASSPHRASE match anywhere in the name. PASS, CRED, AUTH, PRIVATE and DSN
    match only as words or ends of words (SSHPASS, OAUTH), so PASSES and AUTHOR do not match. Ordinary words with
    such an end (COMPASS) are exceptions.
    """
    if _SECRET_PART.search(name):
        return True
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[-1] in _SECRET_METADATA_WORDS:
        return False
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.endswith("pass") and word not in _NOT_SECRET_WORDS and following not in _WORDS_AFTER_TEST_PASS:
            return True
    return any(_SECRET_WORD.fullmatch(word) and word not in _NOT_SECRET_WORDS for word in words)


def redact(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Replace the values of secret variables (see `is_secret_name`) in `text` by `***`.

    Longer values are replaced first, because one secret may be a prefix of another. Short values
    (`TOKENIZERS_PARALLELISM=false`) and existing paths are not redacted, because they occur in ordinary messages.
    """
    return make_redactor(environ)(text)


def make_redactor(environ: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Return a function that redacts like `redact` but reads the environment only once."""
    forms = _forms(_secrets(os.environ if environ is None else environ))

    def redact_text(text: str) -> str:
        for form in forms:
            text = text.replace(form, REDACTED)
        return text

    return redact_text


def show_url(url: str) -> str:
    """Return a URL without credentials; a path is returned unchanged.

    If credentials cannot be separated from the rest, `***` replaces everything after the scheme.
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
    """Apply `show_url` to each URL in a text."""
    return _URL.sub(lambda url: show_url(url[0]), text)


def is_malformed_url(url: str) -> bool:
    """Return whether a URL has a scheme but no valid host."""
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
    """Return the plain and encoded forms of secrets, longest first."""
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
    """Yield the base64 text of `data` inside longer data, for each alignment to 3-byte groups, without shared ends."""
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + data).decode().rstrip("=")
        shared = 1 if (offset + len(data)) % 3 else 0  # the last character also encodes the next byte
        yield encoded[(0, 2, 3)[offset] : len(encoded) - shared]
