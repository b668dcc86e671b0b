"""The pages follow a run while it trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.limits import HANG_S, wait_until
from tests.trackers.folders import write_run, write_step
from tests.view.browser.conftest import serve, start_run
from tests.view.browser.visit import Visit


class LiveRun:
    """A run that trains a step each time it is told to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._process = start_run(
            directory, "--steps", "4", "--wait", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is recorded."""
        path = self.directory / "metrics.jsonl"

        def is_recorded() -> bool:
            assert self._process.poll() is None, self._process.communicate()[0]
            return path.exists() and any(json.loads(line)["step"] == step for line in path.read_text().splitlines())

        wait_until(is_recorded)

    def go(self) -> None:
        """Let it train the next step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def finish(self) -> None:
        """Let it train to the end."""
        with suppress(BrokenPipeError):
            self._process.communicate(input="\n" * 10, timeout=HANG_S)

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def live_run(browser: object, tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path / "runs" / "live")
    try:
        yield run
    finally:
        run.kill()


def test_the_pages_follow_a_run_while_it_trains(live_run: LiveRun, visit_link: Callable[..., Visit]) -> None:
    live_run.wait_for_step(1)
    with serve(live_run.directory.parent) as link:
        overview, runs = visit_link(link), visit_link(link)
        overview.open("#/run/live")
        runs.open()
        assert overview.facts()["Step"] == "1 of 4"
        assert runs.rows()[0][2:4] == ["running", "1 / 4"]
        rewards = overview.page.locator(".plot").first
        overview.page.wait_for_function("() => document.querySelector('.connection').textContent === 'live'")
        for step in (2, 3):
            live_run.go()
            live_run.wait_for_step(step)
            overview.wait_until(lambda step=step: overview.facts()["Step"] == f"{step} of 4")
            runs.wait_until(lambda step=step: runs.rows()[0][3] == f"{step} / 4")
            overview.wait_until(lambda step=step: f"at step {step}" in (rewards.get_attribute("aria-label") or ""))
        live_run.finish()
        overview.wait_until(lambda: "completed" in overview.text("h1"))
        runs.wait_until(lambda: runs.rows()[0][2] == "completed")
        line = json.loads((live_run.directory / "metrics.jsonl").read_text().splitlines()[-1])
        overview.wait_until(lambda: f"→ {line['env/all/reward/mean']:.2f}" in overview.text())
        overview.check()
        runs.check()


def test_a_place_on_the_page_is_kept_when_it_is_updated(live_run: LiveRun, visit_link: Callable[..., Visit]) -> None:
    live_run.wait_for_step(1)
    with serve(live_run.directory.parent) as link:
        visit = visit_link(link)
        visit.open("#/run/live?smooth=0.4")
        visit.page.get_by_label("Metric", exact=True).fill("optim")
        visit.page.evaluate("() => scrollTo(0, 300)")
        live_run.go()
        live_run.wait_for_step(2)
        visit.wait_until(lambda: visit.facts()["Step"] == "2 of 4")
        assert visit.page.evaluate("scrollY") == 300
        assert visit.page.get_by_label("Metric", exact=True).input_value() == "optim"
        assert visit.page.evaluate("() => document.activeElement.type") == "search"
        visit.check()


def test_a_comparison_follows_each_of_its_runs(live_run: LiveRun, visit_link: Callable[..., Visit]) -> None:
    write_run(live_run.directory.parent / "done")
    live_run.wait_for_step(1)
    with serve(live_run.directory.parent) as link:
        visit = visit_link(link)
        visit.open("#/compare/done,live")
        rewards = visit.page.locator(".plot").first
        assert [row[2:4] for row in visit.rows()] == [["completed", "3 / 100"], ["running", "1 / 4"]]
        live_run.go()
        visit.wait_until(lambda: visit.rows()[1][3] == "2 / 4")
        live_run.finish()
        visit.wait_until(lambda: visit.rows()[1][2:4] == ["completed", "4 / 4"])
        visit.wait_until(lambda: "at step 4" in (rewards.get_attribute("aria-label") or "").partition("live")[2])
        visit.check()


def test_a_run_whose_process_died_is_not_live(live_run: LiveRun, visit_link: Callable[..., Visit]) -> None:
    live_run.wait_for_step(1)
    with serve(live_run.directory.parent) as link:
        visit = visit_link(link)
        visit.open()
        assert visit.rows()[0][2] == "running"
        live_run.kill()
        visit.wait_until(lambda: visit.rows()[0][2] == "killed")
        visit.check()


def test_a_page_that_was_opened_before_its_run_shows_it_when_it_appears(
    visit_link: Callable[..., Visit], tmp_path: Path
) -> None:
    with serve(tmp_path) as link:
        runs, step = visit_link(link), visit_link(link)
        runs.open()
        assert "No runs in this folder yet." in runs.text()
        step.open("#/run/late/step/2")
        assert step.texts("h1") == ["Not found"]
        run = write_run(tmp_path / "late", steps=1)
        runs.wait_until(lambda: [row[2:3] for row in runs.rows()] == [["completed"]])
        runs.check()
        write_step(run, 2)
        step.wait_until(lambda: step.texts("h1") == ["Step 2"])
        assert all("404" in problem for problem in step.problems)


def test_a_page_says_that_the_server_is_gone(visit_link: Callable[..., Visit], runs: Path) -> None:
    with serve(runs) as link:
        visit = visit_link(link)
        visit.open("#/run/shop")
    visit.page.wait_for_function("() => document.querySelector('.connection').textContent === 'no connection'")
    assert "12 of 12" in visit.text()  # what was loaded stays


def test_the_command_serves_until_it_is_interrupted(visit_link: Callable[..., Visit], runs: Path) -> None:
    command = ["rlkit", "view", str(runs / "shop"), "--no-open"]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        link, _, hash_ = process.stdout.readline().strip().partition("#")
        visit = visit_link(link)
        visit.open(f"#{hash_}")
        assert visit.text("h1").startswith("shop")
        visit.check()
        os.kill(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=HANG_S)
    finally:  # a server that nobody interrupts would outlive a failed assertion
        process.kill()
        process.communicate()
    token = link.partition("token=")[2]
    assert len(token) > 16
    assert token not in output + errors
    assert "Traceback" not in errors
