"""Sandboxes for untrusted code, without a container engine.

Invariant: nothing in a sandbox outlives its owner, and all files that a sandbox leaves on the disk are removed.
"""

from __future__ import annotations

from rlkit.sandbox.commands import CommandTimeout, CompletedCommand
from rlkit.sandbox.namespaces import Sandbox, View
from rlkit.sandbox.spec import Bind, Limits, Spec

__all__ = ["Bind", "CommandTimeout", "CompletedCommand", "Limits", "Sandbox", "Spec", "View"]
