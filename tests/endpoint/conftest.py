"""Fixtures of agents in a sandbox."""

from __future__ import annotations

from tests.sandbox.conftest import cache, can_sandbox, sandbox_cache

__all__ = ["cache", "can_sandbox", "sandbox_cache"]
