"""Independent random streams from one seed, by purpose."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *path: int | str) -> int:
    """Return a 31-bit seed for the purpose `path`, such as `derive_seed(seed, "sample", draw, member, attempt, turn)`.

    Hashing keeps the streams independent of the order in which they are requested, which concurrency changes.
    """
    text = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 33
