"""URLs in messages.

Invariant: what is shown of a URL has no user, password, query or fragment, which may all be credentials.
"""

from __future__ import annotations

import re

_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]*\]|[\w.~%-]*)(:\d*)?")
_URL = re.compile(r"\w[\w+.-]*://\S+?(?=['\");:,.]*(?:\s|$))")


def show_url(url: str) -> str:
    """Return a URL without credentials, or a path as it is.

    `***` stands for all behind the scheme where credentials cannot be told from the rest.
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
    """Return a text with each URL in it as `show_url` has it."""
    return _URL.sub(lambda url: show_url(url[0]), text)


def is_malformed(url: str) -> bool:
    """Say whether the part of a URL between its scheme and its path is of no known form."""
    return show_url(url).endswith("://***")
