"""Curves of a run, of several, and of the records of a search."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path

import pytest

from tests.view.browser.conftest import can_search, serve
from tests.view.browser.test_hostile import HIDDEN
from tests.view.browser.visit import Visit


def test_a_click_on_the_name_of_a_metric_chooses_it(visit: Visit) -> None:
    visit.open("#/run/shop")
    visit.page.get_by_label("Metric", exact=True).click()
    visit.page.keyboard.type("optim/")
    for name in ("optim/entropy", "optim/kl_sample_train_v1"):
        visit.page.locator(".matches bdi", has_text=name).first.click()
        visit.wait_until(lambda name=name: name in visit.texts(".chart-title"))
    visit.page.get_by_role("heading", level=1).click()
    visit.page.locator(".matches").wait_for(state="hidden")
    visit.check()


COLUMNS = """() => {
  const canvas = document.querySelector(".chart canvas");
  const probe = Object.assign(document.createElement("i"), { style: "color: var(--c0)" });
  document.body.append(probe);
  const colour = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  const { width, height } = canvas;
  const copy = Object.assign(document.createElement("canvas"), { width, height });
  const context = copy.getContext("2d", { willReadFrequently: true });
  context.drawImage(canvas, 0, 0);
  const { data } = context.getImageData(0, 0, width, height);
  const isDrawn = (pixel) => colour.every((value, channel) => Math.abs(data[4 * pixel + channel] - value) < 8);
  const pixels = [...Array(data.length / 4).keys()].filter(isDrawn);
  return pixels.map((pixel) => (pixel % width) / width);
}"""
"""Places from left to right, 0 to 1, of the pixels of the first chart that have the colour of its first curve."""

EDGE = """() => {
  const canvas = document.querySelector(".chart canvas");
  const { data } = canvas.getContext("2d").getImageData(canvas.width - 1, 0, 1, canvas.height);
  return data.filter((_, place) => place % 4 === 3 && data[place] > 0).length;
}"""
"""Number of the pixels at the right edge of the first chart that are drawn on."""


def write_metrics(runs: Path, tmp_path: Path, values: Sequence[float]) -> Path:
    """Return a copy of a run with other rewards, one a step."""
    run = Path(shutil.copytree(runs / "faster", tmp_path / "faster"))
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    lines = [{**line, "step": step, "env/all/reward/mean": value} for step, value in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_huge_numbers_fit_into_their_places(runs: Path, tmp_path: Path, visit_link: Callable[..., Visit]) -> None:
    with serve(write_metrics(runs, tmp_path, [-1e300, 1e300])) as link:
        visit = visit_link(link)
        visit.open("#/run/faster")
        assert "-1.0e+300 → 1.0e+300" in visit.text()
        visit.wait_until(lambda: "1.0e+300" in visit.texts(".chart .legend")[0])
        assert visit.overflow_px() <= 0
        visit.check()


def test_a_single_step_is_in_the_middle_of_its_chart(
    runs: Path, tmp_path: Path, visit_link: Callable[..., Visit]
) -> None:
    with serve(write_metrics(runs, tmp_path, [0.5])) as link:
        visit = visit_link(link)
        visit.open("#/run/faster")
        visit.page.locator(".chart canvas").first.wait_for()
        visit.wait_until(lambda: bool(visit.page.evaluate(COLUMNS)))
        columns = visit.page.evaluate(COLUMNS)
        assert 0.4 < min(columns) < max(columns) < 0.65
        visit.check()


def test_the_number_of_the_last_step_is_whole(runs: Path, tmp_path: Path, visit_link: Callable[..., Visit]) -> None:
    with serve(write_metrics(runs, tmp_path, [0.5] * 1001)) as link:
        visit = visit_link(link)
        visit.open("#/run/faster")
        visit.page.locator(".chart canvas").first.wait_for()
        visit.wait_until(lambda: bool(visit.page.evaluate(COLUMNS)))
        assert visit.page.evaluate(EDGE) == 0
        visit.check()


def test_names_of_metrics_have_no_invisible_characters(visit_link: Callable[..., Visit], hostile_link: str) -> None:
    visit = visit_link(hostile_link)
    visit.open("#/run/hostile?smooth=0.5")
    visit.page.get_by_label("Metric", exact=True).fill("\u202e")
    marks = visit.page.locator(".matches bdi", has_text="‹U+202E›")
    assert marks.count() > 0
    assert visit.page.evaluate(HIDDEN) == []
    marks.first.click()
    visit.page.locator(".chart-title", has_text="‹U+202E›").wait_for()
    assert visit.page.evaluate(HIDDEN) == []
    visit.check()


def test_all_series_of_a_panel_are_drawn_for_each_run(visit: Visit) -> None:
    visit.open("#/compare/shop,faster")
    charts = dict(zip(visit.texts(".chart-title"), visit.texts(".chart .legend"), strict=True))
    assert re.fullmatch(r"shop [\d.]+ · [\d.]+ faster [\d.]+ · [\d.]+ v1 v2", charts["KL sampler–trainer"])
    assert charts["Groups"].endswith(" mixed all good all bad")
    assert re.fullmatch(r"shop [\d.]+ faster [\d.]+", charts["Reward"])
    labels = visit.page.locator(".plot").evaluate_all("nodes => nodes.map((node) => node.ariaLabel)")
    (groups,) = [label for label in labels if label.startswith("Groups.")]
    for run, last in (("shop", 12), ("faster", 4)):
        for kind in ("mixed", "all good", "all bad"):
            assert re.search(rf"{run} {kind}: [\d.]+ at step 1, [\d.]+ at step {last}\b", groups)
    visit.check()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_of_many_compared_runs_has_a_colour_of_its_own(
    visit_link: Callable[..., Visit], link: str, scheme: str
) -> None:
    visit = visit_link(link, scheme=scheme)
    visit.open("#/compare/shop,faster")
    colours = visit.page.evaluate("""async () => {
        const [{ runColour }, { computeColour }] = await Promise.all([import("rlkit/panels"), import("rlkit/dom")]);
        return Array.from({ length: 24 }, (_, index) => computeColour(runColour(index)));
    }""")
    levels = [tuple(map(int, re.findall(r"\d+", colour))) for colour in colours]
    distances = [sum(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in combinations(levels, 2)]
    assert min(distances) > 20
    visit.check()


@pytest.mark.skipif(not can_search(), reason="programs of a search would not be kept apart")
def test_the_records_of_a_search_are_drawn_by_step(visit: Visit, runs: Path) -> None:
    visit.open("#/run/erdos/discovery")
    paths = sorted((runs / "erdos" / "artefacts" / "erdos").glob("*.record.json"))
    best = json.loads(paths[-1].read_text())["value"]
    label = visit.page.locator(".plot").get_attribute("aria-label")
    assert label is not None
    assert label.startswith("C5, record by step.")
    assert label.endswith(f"{float(f'{best:.7g}')} at step 2")
    visit.page.locator(".record a", has_text="step").first.click()
    visit.wait_for_hash("/step/")
    visit.check()
