"""rlkit's own version."""

from __future__ import annotations


def rlkit_version() -> str:
    """The installed version, "unknown" in a checkout that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rlkit")
    except PackageNotFoundError:
        return "unknown"
