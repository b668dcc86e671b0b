"""Registry files of datasets, from a path or a URL.

Invariant: after a registry was read from a URL once, it can be read from the cache if the network or the server fails.
Messages never contain credentials of URLs.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import cast

from rlkit._util import files
from rlkit._util.paths import cache_dir, expand_user
from rlkit._util.redaction import hide_credentials, is_malformed_url, show_url
from rlkit.errors import MissingError, UsageError
from rlkit.types import Json

type Row = Mapping[str, Json]
"""Entry of a registry: a dataset or one of its versions; it has at least a `name`."""

_WAITS_S = (1.0, 3.0)
_LIMIT_S = 30.0


def read_rows(
    registry: str, *, note: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Sequence[Row]:
    """Read the rows of a registry file or URL.

    Raises:
        MissingError: the URL cannot be read, and there is no cached copy.
        UsageError: the file cannot be read or is no JSON list of rows, or the URL is neither http nor https.
    """
    if "://" in registry:
        _check_url(registry)
        return _download(registry, note, sleep)
    try:
        return _parse(expand_user(registry).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UsageError(f"registry: {registry} cannot be read: {reason}") from None
    except _InvalidRegistryError as error:
        raise UsageError(f"registry: {registry} {error}") from None


class _InvalidRegistryError(Exception):
    """A text is not a registry. The message is a predicate, to be appended to the name of the text."""


def _parse(text: str) -> Sequence[Row]:
    try:
        rows: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _InvalidRegistryError(f"is not JSON: {error}") from None
    if not isinstance(rows, list):
        raise _InvalidRegistryError(f"must be a list of datasets, not of type {type(rows).__name__}")
    for index, row in enumerate(cast("list[Json]", rows)):
        if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
            raise _InvalidRegistryError(f"must be a list of datasets, but row {index} has no name")
    return cast("list[Row]", rows)


def _check_url(url: str) -> None:
    import httpx

    scheme = url.partition("://")[0]
    if scheme.lower() not in ("http", "https"):
        raise UsageError(
            f"registry: {show_url(url)} has the scheme {scheme!r}: give a URL of the scheme http or https, or the path "
            "of a file"
        )
    with suppress(httpx.InvalidURL):
        if not is_malformed_url(url) and httpx.URL(url):
            return
    raise UsageError(f"registry: {show_url(url)} is malformed: check it, and percent-encode a user and password in it")


def _download(url: str, note: Callable[[str], None], sleep: Callable[[float], None]) -> Sequence[Row]:
    import httpx

    copy = cache_dir() / "registries" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    displayed_url, reason = show_url(url), ""
    for wait_s in (*_WAITS_S, None):
        try:
            answer = httpx.get(url, timeout=_LIMIT_S, follow_redirects=True)
            if answer.is_success:
                rows = _parse(answer.text)
                files.write_text(copy, answer.text)
                return rows
            reason, can_retry = f"HTTP status {answer.status_code}", answer.is_server_error
        except _InvalidRegistryError as error:  # such as the HTML of a captive portal
            reason, can_retry = f"the answer {error}", False
        except httpx.HTTPError as error:
            reason = hide_credentials(str(error)) or type(error).__name__
            can_retry = isinstance(error, httpx.TransportError)
        if not can_retry or wait_s is None:
            break
        note(f"registry: {displayed_url} cannot be read ({reason}); retrying in {wait_s:g} s")
        sleep(wait_s)
    if copy.is_file():
        with suppress(_InvalidRegistryError):
            rows = _parse(copy.read_text(encoding="utf-8"))
            note(f"registry: {displayed_url} cannot be read ({reason}): using this machine's last copy")
            return rows
    raise MissingError(
        f"registry: {displayed_url} cannot be read ({reason}): check the network, or set registry to a local file"
    )
