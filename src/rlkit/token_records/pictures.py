"""Pictures of episodes that environments draw, for readers of a run.

Invariant: drawing never changes an outcome. An environment that cannot draw leaves the reason in place of a picture.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rlkit._util import files
from rlkit._util.json_values import safe_str
from rlkit.env import Env, TaskSource
from rlkit.types import Episode

VIEW_SCRIPT = "view.js"
"""Script beside the module of an environment, which draws its episodes; the run keeps a copy."""

_HTML_BYTES = 1 << 20


def has_picture(env: Env) -> bool:
    """Return whether an environment has a method `render`."""
    return callable(getattr(env, "render", None))


def add_picture(env: Env, episode: Episode) -> Episode:
    """Return an episode with the HTML of the method `render` of its environment in its info."""
    render: Callable[[Episode], object] = getattr(env, "render")  # noqa: B009  the class of all environments has none
    try:
        picture = render(episode)
        if picture is None:
            return episode
        if not isinstance(picture, str):
            raise TypeError(f"it returned a {type(picture).__name__}, not HTML as a string")
        if len(picture.encode()) > _HTML_BYTES:
            raise ValueError(f"it returned more than {_HTML_BYTES:,} bytes")
    except (Exception, SystemExit) as error:  # the user's code may raise anything, and the episode counts nevertheless
        return add_reason(env, episode, f"{type(error).__name__}: {safe_str(error)}")
    return replace(episode, info={**episode.info, "view": {"html": picture}})


def add_reason(env: Env, episode: Episode, reason: str) -> Episode:
    """Return an episode with the reason why it has no picture."""
    text = html.escape(f"{type(env).__name__}.render failed: {reason}")
    return replace(episode, info={**episode.info, "view": {"html": f"<p>{text}</p>"}})


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
