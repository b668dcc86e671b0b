"""`python -m rlkit`, the same as `rlkit`."""

from __future__ import annotations

from rlkit.cli import main

if __name__ == "__main__":
    main()
