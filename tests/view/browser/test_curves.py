"""Curves of a run, of several, and of the records of a search."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from tests.view.browser.conftest import can_search
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
