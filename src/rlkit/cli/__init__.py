"""The command line.

Invariant: it parses, builds objects, calls the library and maps exceptions to exit codes, nothing else; a command
imports what it needs when it runs.
"""

from rlkit.cli.app import main

__all__ = ["main"]
