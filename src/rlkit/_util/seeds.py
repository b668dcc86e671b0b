"""Independent random streams from one seed, named by what they are for."""

from __future__ import annotations

import hashlib


def derive(seed: int, *path: int | str) -> int:
    """A 31-bit seed for the purpose that `path` names, such as `derive(seed, "sample", draw, member, attempt, turn)`.

    Hashing keeps the streams independent of the order in which they are asked for, which concurrency changes.
    """
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 33
