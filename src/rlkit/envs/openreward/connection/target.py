"""Targets: an environment and the server of its sessions.

Invariant: a target, hosted or on your own server, is given by one string without secrets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from rlkit.errors import UsageError

_HOSTED = re.compile(r"(?P<name>[\w.\-]+/[\w.\-]+)(?:@(?P<version>[\w.\-+]+))?")
_FRAGMENT = re.compile(r"(?P<variant>[\w.\-]*)(?:@(?P<version>[\w.\-+]+))?")
_FORMS = "Owner/Name, Owner/Name@version or http://host:port, followed by #variant if the server has several"


@dataclass(frozen=True)
class Target:
    """Environment on a server."""

    name: str  # `Owner/Name` of a hosted environment; otherwise its name in records
    base_url: str | None = None  # URL of a server of the Open Reward Standard; None for the hosted platform
    variant: str | None = None  # environment of the server; None for its first
    version: str | None = None  # required version; None for any

    @property
    def label(self) -> str:
        """Name in task ids, independent of the port of a local server."""
        return f"{self.name}#{self.variant}" if self.variant and self.base_url is None else self.variant or self.name


def parse_target(text: str) -> Target:
    """Parse a target.

    ::

        GeneralReasoning/WhoDunIt
        GeneralReasoning/WhoDunIt@2f9c1ab
        http://127.0.0.1:8080
        http://127.0.0.1:8080#wordgame

    Raises:
        UsageError: the target is malformed.
    """
    head, mark, tail = text.strip().partition("#")
    fragment = _FRAGMENT.fullmatch(tail)
    if fragment is None or (mark and not tail):
        raise UsageError(f"target: {tail!r} is not a variant; give {_FORMS}")
    variant = fragment["variant"].lower() or None
    if "://" in head:
        return Target(_parse_name(head), head.rstrip("/"), variant, fragment["version"])
    hosted = _HOSTED.fullmatch(head)
    if hosted is None:
        raise UsageError(f"target: {text!r} is not an environment; give {_FORMS}")
    if hosted["version"] and fragment["version"]:
        raise UsageError(f"target: {text!r} has two versions; leave one out")
    return Target(hosted["name"], None, variant, hosted["version"] or fragment["version"])


def _parse_name(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise UsageError(f"target: a URL has the form http://host:port; give {_FORMS}")
    if parts.username or parts.password:
        raise UsageError("target: a URL must not contain a user or password, because it is recorded with the run")
    try:
        port = parts.port
    except ValueError:
        raise UsageError(f"target: the port in {parts.netloc} is not a number") from None
    return parts.hostname if port is None else f"{parts.hostname}:{port}"
