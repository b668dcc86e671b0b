"""Static pages of runs: a file or a folder that opens from the disk, without a server.

Invariant: an export holds the same data as the server gives for each page, except searches in replies and files of
trials, and loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

from rlkit._util import files
from rlkit.errors import UsageError
from rlkit.view.api import respond
from rlkit.view.library import Library
from rlkit.view.server import STATIC
from rlkit.view.tables import Row

_UNESCAPED = "!~*'()"
"""Characters that `encodeURIComponent` of JavaScript leaves as they are, besides letters, digits, `-`, `_` and `.`."""

_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' data: file:; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
"""Policy of the page, which loads nothing but its data, and whose frames cannot leave for another address."""

_FILE_BYTES = 64 << 20
"""Limit of the data in a single file, which a browser reads as a whole."""


def export_html(library: Library, path: Path, *, note: Callable[[str], None] = lambda message: None) -> Path:
    """Write the pages of all runs of a library, and return the page to open.

    Args:
        path: a file that ends in `.html`, or a folder.

    Raises:
        UsageError: the path exists already, or a single file would be too large.
    """
    if path.exists():
        raise UsageError(f"--html: {path} exists already: choose another path, or remove it")
    pages = ((name, _pack(respond(library, name))) for name in _list_pages(library, note))
    try:
        return _write_file(path, pages) if path.suffix == ".html" else _write_folder(path, pages)
    except OSError as error:
        raise UsageError(f"--html: cannot write to {path}: {error.strerror}") from error


def _write_file(path: Path, pages: Iterator[tuple[str, str]]) -> Path:
    inline, size = dict[str, str](), 0
    for name, data in pages:
        inline[name], size = data, size + len(data)
        if size > _FILE_BYTES:
            limit = f"{_FILE_BYTES >> 20} MiB"
            raise UsageError(f"--html: the runs need more than {limit}: give a folder, or fewer runs")
    files.write_text(path, _make_page({"base": None, "inline": inline}))
    return path


def _write_folder(path: Path, pages: Iterator[tuple[str, str]]) -> Path:
    for name, data in pages:
        script = f"rlkitStore({json.dumps(name)}, {json.dumps(data)})\n"
        files.write_text(path / "data" / f"{_file_name(name)}.js", script)
    files.write_text(path / "index.html", _make_page({"base": "data/", "inline": {}}))
    return path / "index.html"


def _list_pages(library: Library, note: Callable[[str], None]) -> Iterator[str]:
    """Yield the path of each page's data."""
    yield "runs"
    for run in library.paths():
        name = f"run/{quote(run, safe=_UNESCAPED)}"
        about: Row = json.loads(respond(library, name))
        yield from (name, f"{name}/metrics", f"{name}/tasks")
        if about["kind"] == "rlkit":
            yield from (f"{name}/evaluations", f"{name}/discovery")
        steps = [("step", number) for number in about["steps_recorded"]]
        steps += [("evaluation", number) for number in about["evaluations"]]
        for place, (kind, number) in enumerate(steps, 1):
            note(f"exporting {run}, {kind} {number} ({place} of {len(steps)})")
            step = f"{name}/{kind}/{number}"
            yield step
            for group in json.loads(respond(library, step))["groups"]:
                yield f"{step}/group/{group['position']}"
                for member in (*group["members"], *group["failed_attempts"]):
                    yield f"{step}/episode/{group['position']}/{member['member']}/{member['attempt']}"


def _pack(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def _file_name(path: str) -> str:
    """Return the path as the name of a file; other characters become the hexadecimal numbers of their bytes."""

    def escape(match: re.Match[str]) -> str:
        return "".join(f".{byte:02x}" for byte in match[0].encode())

    return re.sub(r"[^A-Za-z0-9_-]", escape, path)


def _make_page(data: Row) -> str:
    """Return index.html with its styles, scripts and data inside, since modules do not load from a disk."""
    page = (STATIC / "index.html").read_text()

    def inline_modules(match: re.Match[str]) -> str:
        modules: dict[str, str] = json.loads(match[1])["imports"]
        urls = {name: _data_url(STATIC / place) for name, place in modules.items()}
        # No text of a model can end the script: the data is base64, and `<` is escaped in the names of pages.
        store = json.dumps(data).replace("<", "\\u003c")
        imports = json.dumps({"imports": urls})
        return f'<script>window.rlkitData = {store}</script>\n<script type="importmap">{imports}</script>'

    def inline_file(match: re.Match[str]) -> str:
        kind = "style" if match[0].startswith("<link") else "script"
        attribute = ' type="module"' if "module" in match[0] else ""
        return f"<{kind}{attribute}>{(STATIC / match['place']).read_text()}</{kind}>"

    page = page.replace("<title>", f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n<title>', 1)
    page = re.sub(r'<script type="importmap">(.*?)</script>', inline_modules, page, flags=re.DOTALL)
    page = re.sub(r'<link rel="stylesheet" href="(?P<place>[^"]+)">', inline_file, page)
    return re.sub(r'<script(?: type="module")? src="(?P<place>[^"]+)"></script>', inline_file, page)


def _data_url(path: Path) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(path.read_bytes()).decode()}"
