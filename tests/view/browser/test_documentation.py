"""The search of the built documentation finds the page that answers a question."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser.visit import WAIT_MS

ROOT = Path(__file__).parents[3]

RESULTS = """() => {
  const links = [...document.querySelectorAll(".md-search-result__item > .md-search-result__link")];
  return links.length ? links.map(link => new URL(link.href).pathname) : null;
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the built documentation."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def search(page: Any, site: str, query: str) -> list[str]:
    """Paths of the pages that are found, the best first."""
    page.goto(site)
    box = page.locator("input.md-search__input")
    box.fill(query)
    box.press("End")  # the page reads the box when a key is released, and when its index is loaded
    return page.wait_for_function(RESULTS, timeout=WAIT_MS).json_value()


def test_search_finds_the_page(browser: Any, site: str) -> None:
    context = browser.new_context()
    page = context.new_page()
    requests = list[str]()
    page.on("request", lambda request: requests.append(str(request.url)))
    first = {
        "warm start": "/distillation/",
        "workers": "/scale/",
        "checkpoints prune": "/cli/",
        "journal": "/files/",
        "resume run": "/runs/",
        "resume a run": "/runs/",
        "RLTrainer": "/reference/",
        "evaluate a checkpoint": "/evaluation/",
        "learning rate": "/objective/",
    }
    for query, path in first.items():
        assert search(page, site, query)[0] == path
    assert "/scale/" in search(page, site, "max_concurrent"), "a part of the name `rollouts.max_concurrent` is found"
    context.close()
    assert [url for url in requests if not url.startswith(site)] == []
