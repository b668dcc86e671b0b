"""The command line.

Invariant: the command line only parses arguments, builds objects, calls the library and maps exceptions to exit codes.
"""

from rlkit.cli.app import main

__all__ = ["main"]
