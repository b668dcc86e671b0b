"""Registry files of datasets, from a path or a URL.

Invariant: a registry that was read from a URL once can be read again without a network.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from rlkit import atomic
from rlkit.errors import MissingError, UsageError
from rlkit.paths import cache_dir
from rlkit.types import Json

_WAITS_S = (1.0, 3.0)
_LIMIT_S = 30.0


def is_url(registry: str) -> bool:
    """Say whether a registry is named by a URL, and not by a path."""
    return "://" in registry


def read_rows(
    registry: str, *, note: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> Sequence[Json]:
    """Read the rows of a registry, which may be of any form.

    Args:
        registry: file or URL.
        note: told of trouble with the network.
        sleep: waits so many seconds before another attempt.

    Raises:
        MissingError: the URL cannot be read, and never was.
        UsageError: there is no such file, or it is no list in JSON.
    """
    if is_url(registry):
        text = _download(registry, note, sleep)
    else:
        try:
            text = Path(registry).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise UsageError(f"registry: {registry} cannot be read: {why}") from None
    try:
        rows: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"registry: {registry} is no JSON: {error}") from None
    if not isinstance(rows, list):
        raise UsageError(f"registry: {registry} must be a list of datasets, and not of type {type(rows).__name__}")
    return cast("list[Json]", rows)


def _download(url: str, note: Callable[[str], None], sleep: Callable[[float], None]) -> str:
    import httpx

    kept = cache_dir() / "registries" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    why = ""
    for wait_s in (*_WAITS_S, None):
        try:
            answer = httpx.get(url, timeout=_LIMIT_S, follow_redirects=True)
            if answer.is_success:
                atomic.write_text(kept, answer.text)
                return answer.text
            why, again = f"HTTP status {answer.status_code}", answer.is_server_error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why, again = str(error) or type(error).__name__, isinstance(error, httpx.TransportError)
        if not again or wait_s is None:
            break
        note(f"registry: {url} cannot be read ({why}); trying again in {wait_s:g} s")
        sleep(wait_s)
    if kept.is_file():
        note(f"registry: {url} cannot be read ({why}): taking it as it was when this machine last read it")
        return kept.read_text(encoding="utf-8")
    raise MissingError(
        f"registry: {url} cannot be read ({why}): check the network, or give a file of yours as registry"
    )
