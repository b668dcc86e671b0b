"""An export shows the same pages from the disk."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.view.html_export import export_html
from rlkit.view.library import Library
from tests.view.browser.test_pages import episode_hash, find_episode
from tests.view.browser.visit import Visit

PLACES = (
    "#/",
    "#/run/shop",
    "#/compare/shop,faster",
    "#/run/shop/step/3",
    "#/run/shop/step/3?env=sums&sort=mean",
    "#/run/shop/step/3/group/1",
    "#/run/shop/step/3/episode/1/0/0",
    "#/run/shop/step/3/episode/1/0/0?view=tokens",
    "#/run/shop/tasks",
    "#/run/shop/task/shop/cheapest%20tea?against=faster",
    "#/run/shop/evaluations",
    "#/run/shop/evaluation/4",
)
SERVER_ONLY = ("Text in replies", "Search in replies needs the server.")


@pytest.fixture(scope="module", params=["all.html", "all"])
def exported(request: Any, runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file and a folder with all runs."""
    return export_html(Library([runs]), tmp_path_factory.mktemp("export") / request.param)


def read_facts(visit: Visit) -> str:
    """Return the text of a page without what only a server can do, and without ages, which grow meanwhile."""
    visit.page.wait_for_function(
        "() => [...document.querySelectorAll('#main .chart .plot')].every((plot) => plot.querySelector('canvas'))"
    )
    text = visit.text()
    for words in SERVER_ONLY:
        text = text.replace(words, "")
    return re.sub(r"just now|\d+ (min|h) ago", "", " ".join(text.split()))


@pytest.mark.rotated
@pytest.mark.parametrize("place", PLACES)
def test_an_export_from_the_disk_shows_the_same(
    visit: Visit, visit_link: Callable[..., Visit], exported: Path, place: str
) -> None:
    disk = visit_link(exported.as_uri())
    disk.open(place)
    visit.open(place)
    assert read_facts(disk) == read_facts(visit)
    disk.check()


def test_an_export_needs_no_server_for_search_files_and_frames(
    visit_link: Callable[..., Visit], exported: Path, runs: Path
) -> None:
    disk = visit_link(exported.as_uri())
    disk.open("#/run/shop/step/3")
    assert "Search in replies needs the server." in disk.text()
    step, row = find_episode(runs, "shop", status="completed", reward=1.0)
    disk.open(episode_hash(step, row, "?view=env"))
    disk.page.frame_locator("iframe").get_by_text(f"Basket of {row['task']}").wait_for()
    disk.open(episode_hash(step, row, "?view=files"))
    disk.page.get_by_text("$ buy tea").wait_for()
    disk.page.locator("summary", has_text="receipt.txt").click()
    disk.page.get_by_text(f"receipt of {row['task'].split()[-1]}").wait_for()
    disk.check()


def test_the_keyboard_and_links_work_in_an_export(visit_link: Callable[..., Visit], exported: Path) -> None:
    disk = visit_link(exported.as_uri())
    disk.open("#/run/shop/step/3")
    disk.page.keyboard.press("j")
    disk.page.keyboard.press("Enter")
    disk.wait_for_hash("group/0$")
    disk.page.keyboard.press("u")
    disk.wait_for_hash("step/3$")
    disk.page.reload()
    disk.wait()
    assert disk.texts("h1") == ["Step 3"]
    disk.check()


def test_an_export_of_one_run_opens_at_the_run(visit_link: Callable[..., Visit], runs: Path, tmp_path: Path) -> None:
    disk = visit_link(export_html(Library([runs / "faster"]), tmp_path / "one.html").as_uri())
    disk.open("")
    disk.wait_for_hash("run/faster$")
    assert disk.page.locator("h1").inner_text().startswith("faster")
    disk.page.get_by_role("link", name="rlkit, all runs").click()
    disk.wait()
    assert len(disk.rows()) == 1
    disk.check()


def test_hostile_text_stays_text_in_an_export(
    visit_link: Callable[..., Visit], hostile_runs: Path, tmp_path: Path
) -> None:
    page = export_html(Library([hostile_runs / "hostile"]), tmp_path / "hostile")
    disk = visit_link(page.as_uri())
    for place in ("", "run/hostile", "run/hostile/step/1", "run/hostile/tasks", "run/hostile/step/1/group/0"):
        disk.open(f"#/{place}")
        disk.check()
    for position in range(4):
        for member in range(8):
            disk.open(f"#/run/hostile/step/1/episode/{position}/{member}/0")
            disk.check()
