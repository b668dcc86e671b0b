"""Static pages of runs: a file or a folder that opens from the disk, without a server.

Invariant: an export holds the same data as the server gives for each page and for each file of a trial, except searches
in replies, and loads nothing from elsewhere. An export that fails leaves no page behind.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from urllib.parse import quote

from rlkit._util import files
from rlkit.envs.harbor.trial_files import read_file
from rlkit.errors import RlkitError, UsageError
from rlkit.view.library import Library
from rlkit.view.records.reader import Row
from rlkit.view.server import STATIC

_quote = partial(quote, safe="!~*'()")  # escapes what `encodeURIComponent` of JavaScript escapes

# The page loads nothing but its data, and its frames cannot leave for another address.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' data: file:; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
_FILE_BYTES = 64 << 20  # limit of the data in a single file, which a browser reads as a whole


def export_html(library: Library, path: Path, *, note: Callable[[str], None] = lambda message: None) -> Path:
    """Write the pages of all runs of a library to a new folder, or a file `*.html`, and return the page to open.

    Raises:
        UsageError: the path exists already, a single file would be too large, or the only run is damaged.
    """
    pages = ((name, _encode(gzip.compress(data, mtime=0))) for name, data in _read(library, note))
    write = _write_file if path.suffix == ".html" else _write_folder
    try:
        if path.exists():
            raise UsageError(f"--html: {path} exists already: choose another path, or remove it")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        TemporaryFile(dir=folder).close()  # fails before the runs are read, which takes long
        return write(path, pages, library.start)
    except OSError as error:
        raise UsageError(f"--html: cannot write to {path}: {error.strerror}") from error


def _write_file(path: Path, pages: Iterator[tuple[str, str]], start: str) -> Path:
    inline, size = dict[str, str](), 0
    for name, data in pages:
        inline[name], size = data, size + len(data)
        if size > _FILE_BYTES:
            raise UsageError(f"--html: the runs need over {_FILE_BYTES >> 20} MiB: give a folder, or fewer runs")
    files.write_text(path, _make_page({"base": None, "inline": inline}, start))
    return path


def _write_folder(path: Path, pages: Iterator[tuple[str, str]], start: str) -> Path:
    files.make_folder(path.parent)
    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
        folder = Path(temporary) / path.name
        for name, data in pages:
            file = folder / "data" / f"{_file_name(name)}.js"  # not flushed: the folder may have 100,000 files
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"rlkitStore({json.dumps(name)}, {json.dumps(data)})\n")
        files.write_text(folder / "index.html", _make_page({"base": "data/", "inline": {}}, start))
        folder.rename(path)
    return path / "index.html"


def _read(library: Library, note: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    """Yield path and data of each page; of a damaged run among others, only what is read before the damage."""
    yield "runs", library.respond("runs")
    runs = library.readers()
    for run in runs:
        try:
            yield from _read_run(library, run, note)
        except (RlkitError, OSError) as error:
            if len(runs) == 1:
                raise UsageError(f"--html: {error}") from error
            note(f"{run} is damaged, so most of its pages are left out: {error}")


def _read_run(library: Library, run: str, note: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    name = f"run/{_quote(run)}"
    yield name, (page := library.respond(name))
    about: Row = json.loads(page)
    parts = ("metrics", "tasks", "evaluations", *about.get("parts", ()))
    yield from ((path, library.respond(path)) for path in (f"{name}/{part}" for part in parts))
    steps = [f"step/{number}" for number in about["steps_recorded"]]
    steps += [f"evaluation/{number}" for number in about["evaluations"]]
    for place, step in enumerate(steps, 1):
        note(f"exporting {run}, {step.replace('/', ' ')} ({place} of {len(steps)})")
        yield f"{name}/{step}", (page := library.respond(f"{name}/{step}"))
        for group in json.loads(page)["groups"]:
            yield (path := f"{name}/{step}/group/{group['position']}"), library.respond(path)
            for member in (*group["members"], *group["failed_attempts"]):
                path = f"{name}/{step}/episode/{group['position']}/{member['member']}/{member['attempt']}"
                yield path, (page := library.respond(path))
                yield from _read_files(path, json.loads(page))


def _read_files(path: str, episode: Row) -> Iterator[tuple[str, bytes]]:
    for file in episode["files"]:
        with suppress(RlkitError, OSError):  # such as a file of another user, which the server does not give either
            content = json.dumps(read_file(episode["info"], file["path"]), separators=(",", ":"))
            yield f"{path}/file?path={_quote(file['path'])}", content.encode()


def _file_name(path: str) -> str:
    """Return a path of the API, which is ASCII, as the name of a file, within folders if it is long."""
    name = re.sub(r"[^\w-]", lambda match: f".{ord(match[0]):02x}", path)
    return re.sub(r".{200}(?=.)", r"\g<0>/", name)


def _make_page(data: Row, start: str) -> str:
    """Return index.html with its styles, scripts and data inside, since modules do not load from a disk."""
    # No text of a model can end the script: the data is base64, and `<` is escaped in the names of pages.
    frame = (STATIC / "frame.html").read_text()
    store = json.dumps({**data, "frame": frame}).replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    texts = {str(path.relative_to(STATIC)): path.read_text() for path in STATIC.rglob("*.*s")}  # .js and .css
    urls = {name: f'"data:text/javascript;base64,{_encode(text.encode())}"' for name, text in texts.items()}
    page = (STATIC / "index.html").read_text()
    page = re.sub(r'"\./([^"]+)"', lambda match: urls[match[1]], page)
    page = re.sub(r'<link rel="stylesheet" href="([^"]+)">', lambda match: f"<style>{texts[match[1]]}</style>", page)
    script = re.compile(r'<script( type="module")? src="([^"]+)"></script>')
    page = script.sub(lambda match: f"<script{match[1] or ''}>{texts[match[2]]}</script>", page)
    scripts = f"<script>window.rlkitData = {store}</script>\n<script>location.hash ||= {json.dumps(start)}</script>"
    return page.replace("<title>", f"{policy}\n{scripts}\n<title>", 1)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
