"""A browser, recorded runs and a server that shows them.

These tests are skipped unless Playwright and Debian's Chromium are there:

    uv run --with playwright==1.65.2 --with axe-playwright-python==0.1.8 pytest tests/view/browser
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlkit.sandbox.inside import landlock, program_filter
from rlkit.view.library import Library
from rlkit.view.server import ViewServer
from tests.limits import HANG_S
from tests.view.browser.hostile_run import write_hostile_runs
from tests.view.browser.visit import Visit

ROOT = Path(__file__).parents[3]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTH, HEIGHT = 1280, 800


def can_search() -> bool:
    """Return whether this machine keeps programs of a search apart."""
    return sys.platform == "linux" and bool(landlock.version()) and program_filter.program() is not None


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Chromium, or a skipped test."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []  # Chromium has no sandbox for root
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@contextmanager
def serve(*places: Path) -> Iterator[str]:
    """Serve runs, and yield the link."""
    server = ViewServer(Library(places))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server.link
    finally:
        server.stop()
        thread.join()


def start_run(directory: Path, *options: str, **pipes: Any) -> subprocess.Popen[str]:
    """Start to record a run in a process of its own."""
    command = [sys.executable, "-m", "tests.view.browser.recorded_run", str(directory), *options]
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a run."""
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output


@pytest.fixture(scope="package")
def runs(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of real runs: `shop` and `faster`, and `erdos` where programs can be kept apart."""
    folder = tmp_path_factory.mktemp("runs")
    processes = [
        start_run(folder / "shop", "--steps", "12"),
        start_run(folder / "faster", "--steps", "4", "--learning-rate", "3e-4"),
    ]
    if can_search():
        command = [sys.executable, "-m", "tests.envs.discovery.playing", str(folder / "erdos"), "2"]
        processes.append(subprocess.Popen(command, cwd=ROOT, text=True))
    for process in processes:
        finish(process)
    return folder


@pytest.fixture(scope="package")
def link(runs: Path) -> Iterator[str]:
    """Link to the pages of the real runs."""
    with serve(runs) as link:
        yield link


@pytest.fixture(scope="package")
def hostile_runs(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of runs with hostile text."""
    return write_hostile_runs(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="package")
def hostile_link(hostile_runs: Path) -> Iterator[str]:
    """Link to the pages of the hostile runs."""
    with serve(hostile_runs) as link:
        yield link


@pytest.fixture
def visit_link(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Function that opens a window on a link; at the end of the test, nothing may have happened that must not."""
    visits = list[Visit]()

    def visit(link: str, *, width: int = WIDTH, scheme: str = "light") -> Visit:
        context = browser.new_context(
            viewport={"width": width, "height": HEIGHT}, color_scheme=scheme, reduced_motion="reduce"
        )
        visits.append(Visit(context.new_page(), link))
        return visits[-1]

    yield visit
    for one in visits:
        one.page.context.close()


@pytest.fixture
def visit(visit_link: Callable[..., Visit], link: str) -> Visit:
    """A window on the real runs."""
    return visit_link(link)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the reason once for all tests, before a run is recorded in vain."""
    reason = None
    if find_spec("playwright") is None:
        reason = "Playwright is not installed"
    elif CHROMIUM is None:
        reason = "there is no chromium"
    for item in items:
        if reason is not None and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=reason))
