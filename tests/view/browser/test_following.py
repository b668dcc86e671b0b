"""The pages of a step, a group and a task follow a run that trains, and stay where the reader is."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.trackers.folders import write_run, write_step
from tests.view.browser.conftest import can_search, serve
from tests.view.browser.test_live import LiveRun
from tests.view.browser.test_pages import read_step
from tests.view.browser.visit import Visit

FOCUS = "() => document.activeElement.getAttribute('href')"
LIVE_STEPS = 4
"""Steps of a `LiveRun`."""

STEP = 3
"""The last step that is recorded when a page is opened."""


class PartialRun:
    """A copy of a recorded run that has the files of its first steps only.

    Args:
        source: the whole run.
        directory: of the copy; it has the tables until `STEP`, and the updates and metrics until the step before.
    """

    def __init__(self, source: Path, directory: Path) -> None:
        self.source, self.directory = source, directory
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("episodes", "updates", "metrics.jsonl"))
        self._add_tables(range(1, STEP + 1))
        self._add_updates(range(1, STEP))

    def finish_step(self) -> None:
        """Add the update and the metrics of `STEP`."""
        self._add_updates(range(STEP, STEP + 1))

    def add_step(self) -> None:
        """Add the step after `STEP`."""
        self._add_tables(range(STEP + 1, STEP + 2))
        self._add_updates(range(STEP + 1, STEP + 2))

    def _add_tables(self, steps: range) -> None:
        for step in steps:
            name = f"episodes/step={step:06d}"
            shutil.copytree(self.source / name, self.directory / name)

    def _add_updates(self, steps: range) -> None:
        (self.directory / "updates").mkdir(exist_ok=True)
        for step in steps:
            name = f"updates/{step:06d}.parquet"
            shutil.copy(self.source / name, self.directory / name)
        lines = (self.source / "metrics.jsonl").read_text().splitlines(keepends=True)
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.writelines(line for line in lines if json.loads(line)["step"] in steps)


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> PartialRun:
    return PartialRun(runs / "shop", tmp_path / "runs" / "shop")


@contextmanager
def visit_run(run: PartialRun, visit_link: Callable[..., Visit], hash_: str) -> Iterator[Visit]:
    """Open a page of a run that grows."""
    with serve(run.directory.parent) as link:
        visit = visit_link(link)
        visit.open(hash_)
        yield visit
        visit.check()


def find_mixed(run: PartialRun) -> int:
    """Return the position of a group of `STEP` whose members earned different rewards."""
    table = read_step(run.source, STEP)
    groups = table[table.final & ~table.masked].groupby("position")
    return next(int(position) for position, group in groups if group.reward.nunique() > 1)


def test_a_step_shows_what_its_update_says(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    position = find_mixed(run)
    with visit_run(run, visit_link, f"#/run/shop/step/{STEP}?mixed=1") as visit:
        chip = visit.page.locator(f"a.chip[href*='/episode/{position}/0/']")
        link = visit.page.locator(f"a.row-link[href$='/group/{position}']")
        visit.page.get_by_label("Task").focus()
        assert visit.page.get_by_label("Go to").input_value() == str(STEP)
        assert "advantage" not in chip.get_attribute("title")
        rows = visit.rows()
        assert {row[5] for row in rows} == {"not trained yet"}
        run.finish_step()
        visit.wait_until(lambda: "advantage" in chip.get_attribute("title"))
        assert visit.page.evaluate("() => document.activeElement.type") == "search"
        assert visit.page.get_by_label("Mixed").is_checked()
        assert [row[:5] for row in visit.rows()] == [row[:5] for row in rows]
        assert {row[5] for row in visit.rows()} == {"yes"}
        link.focus()
        run.add_step()
        visit.wait_until(lambda: visit.page.get_by_label("Go to").locator("option").count() == STEP + 1)
        assert visit.page.get_by_label("Go to").input_value() == str(STEP)
        assert visit.page.evaluate(FOCUS) == link.get_attribute("href")


def test_an_update_that_fails_is_repeated(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    position = find_mixed(run)
    with visit_run(run, visit_link, f"#/run/shop/step/{STEP}?mixed=1") as visit:
        pattern = f"**/api/run/shop/step/{STEP}"
        visit.page.route(pattern, lambda route: route.abort())
        run.finish_step()
        visit.page.locator(".connection", has_text="no connection").wait_for()
        visit.page.unroute(pattern)
        visit.wait_until(lambda: {row[0]: row[5] for row in visit.rows()}[str(position)] == "yes")
        assert visit.page.locator(".connection", has_text="no connection").count() == 0
        visit.problems.clear()  # the request that failed


def test_a_row_of_a_step_keeps_the_focus_and_its_place(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    with visit_run(run, visit_link, f"#/run/shop/step/{STEP}") as visit:
        visit.page.set_viewport_size({"width": 800, "height": 300})
        link = visit.page.locator("a.row-link").last
        link.focus()
        before = visit.page.evaluate("scrollY"), visit.page.evaluate(FOCUS)
        assert before[0] > 0
        run.finish_step()
        visit.wait_until(lambda: "advantage" in visit.page.locator("a.chip").first.get_attribute("title"))
        assert (visit.page.evaluate("scrollY"), visit.page.evaluate(FOCUS)) == before


def test_a_group_shows_what_its_update_says(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    with visit_run(run, visit_link, f"#/run/shop/step/{STEP}/group/{find_mixed(run)}") as visit:
        assert "Estimator" not in visit.facts()
        fold = visit.page.locator(".column details").first
        fold.locator("summary").click()
        link = visit.page.locator(".column h3 a").last
        link.focus()
        href = link.get_attribute("href")
        run.finish_step()
        visit.wait_until(lambda: "Estimator" in visit.facts())
        assert visit.texts(".column .advantage")
        assert visit.page.evaluate(FOCUS) == href
        assert fold.get_attribute("open") is not None


def test_an_episode_shows_what_its_update_says(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    page = f"#/run/shop/step/{STEP}/episode/{find_mixed(run)}/0/0?view=tokens&colour=mask"
    with visit_run(run, visit_link, page) as visit:
        assert "not trained yet" in visit.facts().values()
        assert "not recorded for this episode" in visit.text(".token-legend")
        visit.page.get_by_label("Colour by").focus()
        run.finish_step()
        visit.wait_until(lambda: "Estimator" in visit.facts())
        assert "trained on" in visit.text(".token-legend")
        assert visit.page.get_by_label("Colour by").input_value() == "mask"
        visit.page.get_by_role("link", name="Chat").click()
        visit.page.get_by_text("You ").first.wait_for()


def test_a_difference_of_replies_stays_chosen(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    with visit_run(run, visit_link, f"#/run/shop/step/{STEP}/group/{find_mixed(run)}") as visit:
        visit.page.get_by_role("button", name="Best against worst").click()
        visit.wait_for_hash("diff=")
        visit.wait_until(lambda: all(visit.texts(".column .text")))
        before, texts = visit.hash, visit.texts(".column .text")
        column = visit.page.locator(".column").first.element_handle()
        first, second = (visit.page.get_by_label(label, exact=True) for label in ("Differences between", "and"))
        second.focus()
        run.finish_step()
        visit.wait_until(lambda: "Estimator" in visit.facts())
        assert (visit.hash, visit.texts(".column .text")) == (before, texts)
        assert column.evaluate("(column) => column.isConnected"), "a new column would lose the text that is selected"
        assert second.evaluate("(select) => document.activeElement === select")
        assert before.endswith(f"diff={first.input_value()}%2C{second.input_value()}")


def test_a_task_shows_new_episodes(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    table = read_step(run.source, STEP + 1)
    task = table[table.env == "shop"].task.iloc[0]
    with visit_run(run, visit_link, f"#/run/shop/task/shop/{task.replace(' ', '%20')}") as visit:
        visit.page.locator("a.row-link").first.focus()
        before = visit.page.evaluate(FOCUS)
        assert f"step {STEP + 1}" not in visit.text()
        run.add_step()
        visit.page.locator("a.row-link", has_text=f"step {STEP + 1}").wait_for()
        label = visit.page.locator(".plot").get_attribute("aria-label")
        assert f"at step {STEP + 1}" in label
        assert visit.page.evaluate(FOCUS) == before


def test_the_tasks_show_new_episodes(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    table = read_step(run.source, STEP + 1)
    task = table[table.env == "shop"].task.iloc[0]
    with visit_run(run, visit_link, f"#/run/shop/tasks?q={task}") as visit:
        visit.page.locator("a.row-link").first.focus()
        before = visit.page.evaluate(FOCUS)
        (row,) = visit.rows()
        run.add_step()
        visit.wait_until(lambda: int(visit.rows()[0][1]) > int(row[1]))
        assert len(visit.rows()) == 1
        assert visit.page.evaluate(FOCUS) == before


def test_a_row_of_the_list_of_runs_keeps_the_focus(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    with visit_run(run, visit_link, "#/") as visit:
        for target in (visit.page.locator("a.row-link"), visit.page.get_by_label("Select shop")):
            target.focus()
            before = visit.rows()
            visit.page.evaluate("(row) => (window.row = row)", visit.page.locator("tr[data-row]").element_handle())
            os.utime(run.directory / "run.json")
            visit.wait_until(lambda: not visit.page.evaluate("() => row.isConnected"))
            assert visit.rows() == before
            assert target.evaluate("(node) => document.activeElement === node")


def test_the_configuration_of_a_run_stays_as_it_was_opened(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    with visit_run(run, visit_link, "#/run/shop") as visit:
        box = visit.page.get_by_label("Show defaults")
        visit.page.locator("details summary", has_text="Checkpoints").click()
        default = visit.page.locator("tr.default").first
        assert not default.is_visible()
        box.check()
        assert default.is_visible()
        visit.page.evaluate("() => scrollTo(0, document.documentElement.scrollHeight)")
        before = visit.page.evaluate("scrollY")
        run.finish_step()
        plot = visit.page.locator(".plot").first
        visit.wait_until(lambda: f"at step {STEP}" in (plot.get_attribute("aria-label") or ""))
        assert visit.page.evaluate("scrollY") == before
        assert box.is_checked()
        assert visit.page.evaluate("() => document.activeElement.type") == "checkbox"
        assert visit.page.locator("details").first.get_attribute("open") is not None


def test_a_filter_of_evaluations_keeps_the_focus(run: PartialRun, visit_link: Callable[..., Visit]) -> None:
    tables = run.directory / "evaluations"
    last = max(tables.iterdir())
    last.rename(run.directory / last.name)
    with visit_run(run, visit_link, "#/run/shop/evaluations") as visit:
        search = visit.page.get_by_role("searchbox", name="Task")
        search.press_sequentially("3")
        options = visit.page.get_by_label("Evaluation", exact=True).locator("option")
        count = options.count()
        (run.directory / last.name).rename(last)
        visit.wait_until(lambda: options.count() == count + 1)
        assert search.input_value() == "3"
        assert visit.page.evaluate("() => document.activeElement.type") == "search"
        assert options.last.get_attribute("value") == visit.page.get_by_label("Evaluation", exact=True).input_value()


@pytest.mark.parametrize("place", ["", "/evaluation/0/group/0", f"/step/{STEP}/episode/0/0/0"])
def test_the_tabs_of_a_run_follow_it(run: PartialRun, visit_link: Callable[..., Visit], place: str) -> None:
    with visit_run(run, visit_link, f"#/run/shop{place}") as visit:
        tab = visit.page.locator("nav.tabs a", has_text="Steps")
        tab.focus()
        assert (tab.get_attribute("href") or "").endswith(f"/step/{STEP}")
        run.add_step()
        visit.wait_until(lambda: (tab.get_attribute("href") or "").endswith(f"/step/{STEP + 1}"))
        assert visit.page.evaluate("() => document.activeElement.textContent") == "Steps"


def test_a_run_gets_a_tab_when_it_has_a_page_for_it(tmp_path: Path, visit_link: Callable[..., Visit]) -> None:
    run = write_run(tmp_path / "late", steps=0)
    with serve(tmp_path) as link:
        visit = visit_link(link)
        visit.open("#/run/late")
        assert visit.texts("nav.tabs a") == ["Overview"]
        write_step(run, 1)
        visit.wait_until(lambda: visit.texts("nav.tabs a") == ["Overview", "Steps", "Tasks"])
        visit.check()


@pytest.mark.skipif(not can_search(), reason="programs of a search would not be kept apart")
def test_a_record_stays_as_it_was_opened(runs: Path, tmp_path: Path, visit_link: Callable[..., Visit]) -> None:
    run = Path(shutil.copytree(runs / "erdos", tmp_path / "runs" / "erdos"))
    earliest, *_ = sorted((run / "artefacts" / "erdos").glob("*.record.json"))  # another one remains the best
    text = earliest.read_text()
    earliest.unlink()
    with serve(run.parent) as link:
        visit = visit_link(link)
        visit.open("#/run/erdos/discovery")
        records = visit.page.locator(".record")
        count = records.count()
        records.first.locator("summary", has_text="Program").click()
        earliest.write_text(text)
        visit.wait_until(lambda: records.count() > count)
        assert visit.page.locator(".record details[open]").count() == 1
        visit.check()


def test_the_step_after_the_last_one_can_be_reached_when_it_is_recorded(
    tmp_path: Path, visit_link: Callable[..., Visit]
) -> None:
    run = LiveRun(tmp_path / "runs" / "live")
    try:
        run.wait_for_step(1)
        with serve(run.directory.parent) as link:
            visit = visit_link(link)
            visit.open("#/run/live/step/1")
            options = visit.page.get_by_label("Go to").locator("option")
            last = options.count()  # rollouts may be ahead of the training
            assert last < LIVE_STEPS
            visit.open(f"#/run/live/step/{last}")
            run.finish()
            visit.wait_until(lambda: options.count() > last)
            visit.page.get_by_label("Next ( ] )").wait_for()
            visit.page.keyboard.press("]")
            visit.page.get_by_role("heading", name=f"Step {last + 1}").wait_for()
            visit.check()
    finally:
        run.kill()
