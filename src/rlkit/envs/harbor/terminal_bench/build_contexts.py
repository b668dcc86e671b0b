"""Build contexts in a task's `docker-compose.yaml`.

Invariant: a converted task contains no files, build contexts or Dockerfiles from outside the task's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlkit._util.files.json_fields import pick_object
from rlkit.types import Json


def find_context_fault(task: Path, compose: Mapping[str, Json]) -> str | None:
    """Return the reason why the build contexts of a task's compose file cannot be copied, or None."""
    for service, settings in pick_object(compose, "services").items():
        for setting, path in _list_paths(pick_object(settings, "").get("build")):
            if _leaves(task, path):
                return f"the {setting} of its service {service!r} leads out of its folder: {path!r}"
    return None


def _list_paths(build: Json) -> Iterator[tuple[str, str]]:
    """Yield the paths of a service's `build`, relative to the task's folder."""
    if isinstance(build, str):
        yield "build context", build
        return
    settings = pick_object(build, "")
    context, dockerfile = settings.get("context", "."), settings.get("dockerfile")
    if isinstance(context, str):
        yield "build context", context
        if isinstance(dockerfile, str):
            yield "dockerfile", os.path.join(context, dockerfile)  # noqa: PTH118  a Path drops `.` parts


def _leaves(task: Path, path: str) -> bool:
    """Return whether a path leads out of a task's folder, also through links; True for a path with a variable."""
    if "$" in path or path.startswith(("/", "~")) or os.path.normpath(path).split("/")[0] == "..":
        return True
    try:
        return not Path(os.path.realpath(task / path)).is_relative_to(os.path.realpath(task))
    except ValueError:  # a null character
        return True
