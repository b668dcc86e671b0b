"""Curves of a run and of several: metrics are found by their names."""

from __future__ import annotations

from collections.abc import Callable

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
