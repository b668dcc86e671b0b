"""The page of a run in the frame of a notebook."""

from __future__ import annotations

import html
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from rlkit.view.library import Library
from rlkit.view.server import ViewServer


@dataclass(frozen=True)
class RunView:
    """The page of a run; a notebook shows it in a frame."""

    link: str

    def __str__(self) -> str:
        return self.link

    def _repr_html_(self) -> str:
        link = html.escape(self.link)
        frame = f'<iframe src="{link}" width="100%" height="720" style="border: 1px solid #8884"></iframe>'
        return f'<p><a href="{link}" target="_blank">{link}</a></p>{frame}'


@cache
def view_run(directory: Path) -> RunView:
    """Serve the page of a run in the background of this process, and return its view."""
    server = ViewServer(Library([directory]), frame_ancestors="http://localhost:* http://127.0.0.1:*")
    threading.Thread(target=server.run, name="rlkit_view", daemon=True).start()
    return RunView(f"{server.link}#/run/{quote(directory.name, safe='')}")
