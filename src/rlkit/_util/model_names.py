"""Names of models on the Hugging Face hub, from names or local paths.

Invariant: every result is a name on the hub, never a local path.
"""

from __future__ import annotations

import re

from rlkit._util.paths import cache_dir, expand_user

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_REPOSITORY = re.compile(r"(?:[A-Za-z0-9][\w.\-]*/)?[A-Za-z0-9][\w.\-]*")
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/[^/]+")
_CACHED = re.compile(r"(?P<owner>.+?)--(?P<name>.+?)(?P<converted>-[0-9a-f]{16})?")
"""Name of a folder in rlkit's cache; a name with a hash was converted from a user's file."""


def hub_id(model: str) -> str | None:
    """Return the hub's name of a model, given by this name or by a path in a cache; None if unknown."""
    path = expand_user(model)
    if not path.exists():
        return model if _REPOSITORY.fullmatch(model) and not model.lower().endswith(".gguf") else None
    for place in (path.absolute(), path.resolve()):
        if match := _SNAPSHOT.fullmatch("/".join(place.parts[-3:])):
            return f"{match['owner']}/{match['name']}"
        if place.parent == cache_dir() / "models" and (match := _CACHED.fullmatch(place.name)):
            return None if match["converted"] else f"{match['owner']}/{match['name']}"
    return None
