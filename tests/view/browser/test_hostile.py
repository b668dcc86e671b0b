"""No text of a model or an environment runs as a script, loads anything, or breaks the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from rlkit.view.library import Library
from tests.view.browser.hostile_run import MEMBERS
from tests.view.browser.hostile_texts import LINKS, MARKUP, NAMES, RUN_NAMES, TEXTS
from tests.view.browser.test_pages import read_page
from tests.view.browser.visit import Visit

HOSTILE_GROUPS = -(-len(TEXTS) // MEMBERS)

HIDDEN = r"""() => {
  const hidden = /[\u0000-\u0008\u000e-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]|[\u{e0000}-\u{e0fff}]|\p{Cs}/u;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_TEXT);
  const found = [];
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const texts = node.nodeType === Node.TEXT_NODE ? [node.data] : [node.title, node.ariaLabel];
    const text = texts.find((one) => one && hidden.test(one));
    if (text) found.push(`${(node.parentElement ?? node).tagName}.${node.parentElement?.className}: ${JSON.stringify(text.slice(0, 80))}`);
  }
  return [...new Set(found)].slice(0, 5);
}"""  # noqa: E501  one regular expression

FOREIGN_NODES = """() => [...document.querySelectorAll([
  "script", "iframe", "object", "embed", "link", "style", "base", "meta", "video", "audio", "form[action]", "[onerror]",
  "[onload]", "[style*=fixed]", "a[href^='javascript' i]", "a[href^='data:']", "a[href^='http']",
  "img:not([src^='data:image/'])",
].map((selector) => `#app ${selector}`).join(","))].map((node) => node.outerHTML.slice(0, 200))"""

FRAME = """() => {
  const [top, main] = [document.querySelector("header.top"), document.querySelector("#main")].map((node) => node.getBoundingClientRect());
  return top.height < 200 && top.left >= 0 && top.right <= innerWidth + 1 && main.right <= innerWidth + 1;
}"""  # noqa: E501  one condition


def inspect(visit: Visit) -> None:
    """Assert that the page is whole and shows text only."""
    visit.check()
    assert visit.overflow_px() <= 0, visit.hash
    assert visit.page.evaluate(FRAME), visit.hash
    assert visit.page.evaluate(FOREIGN_NODES) == [], visit.hash
    assert visit.page.evaluate(HIDDEN) == [], visit.hash
    assert visit.page.evaluate("() => document.title").endswith("rlkit")


def open_all(visit: Visit) -> None:
    """Open all that is folded, and show all of the texts that are cut."""
    visit.page.evaluate("() => document.querySelectorAll('#main details').forEach((one) => (one.open = true))")


@pytest.fixture
def hostile(visit_link: Callable[..., Visit], hostile_link: str) -> Visit:
    """A window on the hostile runs."""
    return visit_link(hostile_link, width=1000)


def test_there_are_a_hundred_kinds() -> None:
    assert len(set(TEXTS)) == 100


@pytest.mark.parametrize("place", ["", "/step/1", "/tasks", "/evaluations", "/evaluation/1", "/discovery"])
def test_the_pages_of_a_run_are_whole(hostile: Visit, place: str) -> None:
    hostile.open(f"#/run/hostile{place}")
    open_all(hostile)
    inspect(hostile)


def test_the_list_of_runs_and_a_comparison_are_whole(hostile: Visit, hostile_runs: Path) -> None:
    hostile.open()
    assert len(hostile.rows()) == len(RUN_NAMES) + 1
    inspect(hostile)
    names = ",".join(quote(name, safe="") for name in Library([hostile_runs]).readers())
    hostile.open(f"#/compare/{quote(names, safe='')}")
    inspect(hostile)


@pytest.mark.parametrize("number", range(len(RUN_NAMES)))
def test_a_run_of_any_name_can_be_opened_from_the_list(hostile: Visit, number: int) -> None:
    hostile.open("#/?sort=name")
    name = sorted(RUN_NAMES)[number]
    links = hostile.page.locator("a.row-link")
    (link,) = [link for link in links.all() if unquote(link.get_attribute("href").removeprefix("#/run/")) == name]
    link.click()
    hostile.wait_for_hash("^#/run/")
    hostile.page.get_by_role("heading", name="Configuration").wait_for()
    inspect(hostile)
    hostile.page.get_by_role("link", name="Steps", exact=True).click()
    hostile.wait_for_hash("/step/1$")
    assert len(hostile.rows()) == 1 + len(NAMES)
    inspect(hostile)


@pytest.mark.parametrize("position", range(HOSTILE_GROUPS))
def test_each_hostile_text_is_shown_as_text(hostile: Visit, hostile_runs: Path, position: int) -> None:
    group = read_page(hostile_runs, f"run/hostile/step/1/group/{position}")
    hostile.open(f"#/run/hostile/step/1/group/{position}")
    open_all(hostile)
    inspect(hostile)
    for member in group["members"]:
        place = f"#/run/hostile/step/1/episode/{position}/{member['member']}/0"
        hostile.open(place)
        open_all(hostile)
        inspect(hostile)
        text = TEXTS[position * MEMBERS + member["member"]]
        shown = hostile.page.evaluate("() => document.querySelector('.message .text').textContent")
        if text in MARKUP or text in LINKS:
            assert shown == text
        hostile.open(f"{place}?view=tokens")
        inspect(hostile)


@pytest.mark.parametrize("name", NAMES)
def test_a_task_of_any_name_has_its_page(hostile: Visit, name: str) -> None:
    position = HOSTILE_GROUPS + NAMES.index(name)
    hostile.open(f"#/run/hostile/step/1/group/{position}")
    hostile.page.get_by_role("link", name="this task across steps").click()
    hostile.wait_for_hash("/task/")
    assert len(hostile.rows()) in (1, 2)  # the last ones are evaluated, too
    inspect(hostile)
    before = hostile.text()
    hostile.page.reload()
    hostile.wait()
    assert hostile.text() == before


def test_a_very_long_text_can_be_shown_as_a_whole(hostile: Visit) -> None:
    place = TEXTS.index("x" * 1_000_000)
    hostile.open(f"#/run/hostile/step/1/episode/{place // MEMBERS}/{place % MEMBERS}/0")
    button = hostile.page.get_by_role("button", name="Show all 1,000,000 characters").first
    button.click()
    hostile.page.wait_for_function("() => document.querySelector('.message .text').textContent.length >= 1000000")
    inspect(hostile)


def test_a_search_and_a_filter_take_any_text(hostile: Visit) -> None:
    hostile.open("#/run/hostile/step/1")
    for text in ("<img src=x onerror=window.pwned=1>", "%2e", "\\", "'\"", "(*+?["):
        hostile.page.get_by_label("Text in replies").fill(text)
        hostile.wait_until(lambda text=text: quote(text, safe="*") in hostile.hash.replace("+", "%20"))
        hostile.wait()
        inspect(hostile)
