"""Pictures of episodes that environments draw, for readers of a run.

Invariant: drawing never changes an outcome. An environment that cannot draw leaves the reason in place of a picture.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rlkit._util import files
from rlkit._util.json_values import safe_str
from rlkit.env import Env, TaskSource
from rlkit.types import Episode

VIEW_SCRIPT = "view.js"
"""Script beside the module of an environment, which draws its episodes; the run keeps a copy."""

_HTML_BYTES = 1 << 20


def add_picture(env: Env, episode: Episode) -> Episode:
    """Return an episode with the HTML of the method `render` of its environment, if there is one, in its info."""
    render: object = getattr(env, "render", None)
    if not callable(render):
        return episode
    try:
        picture = render(episode)
        if picture is None:
            return episode
        if not isinstance(picture, str):
            raise TypeError(f"it returned a {type(picture).__name__}, not HTML as a string")
        if len(picture.encode()) > _HTML_BYTES:
            raise ValueError(f"it returned more than {_HTML_BYTES:,} bytes")
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and the episode counts nevertheless
        reason = f"{type(env).__name__}.render failed: {type(error).__name__}: {safe_str(error)}"
        picture = f"<p>{html.escape(reason)}</p>"
    return replace(episode, info={**episode.info, "view": {"html": picture}})


def copy_view_scripts(tasks: Mapping[str, TaskSource | Iterable[Env]], folder: Path) -> None:
    """Copy the script beside the module of each environment, if there is one, to the environment's folder in `folder`.

    Args:
        tasks: the tasks of each environment; the first one decides where its module is.
    """
    for name, source in tasks.items():
        first = source if isinstance(source, TaskSource) else next(iter(source), None)
        try:
            script = Path(inspect.getfile(type(first))).with_name(VIEW_SCRIPT)
        except (OSError, TypeError):  # a class of a notebook, or of the interpreter itself
            continue
        if script.is_file():
            files.write_bytes(folder / name / VIEW_SCRIPT, script.read_bytes())
