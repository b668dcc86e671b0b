"""Filters, sorts and places have addresses, and the keyboard reaches everything."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser.conftest import WIDTH, serve
from tests.view.browser.test_pages import episode_hash, find_episode, read_step
from tests.view.browser.visit import Visit

HEADING = """() => {
  const { left, top } = document.querySelector("#turn-1 h3").getBoundingClientRect();
  return document.elementFromPoint(left + 5, top + 5)?.textContent;
}"""
"""What is on the screen in the place of the heading of the second turn."""

STATES = (
    "#/?q=shop&sort=reward",
    "#/?select=shop%2Cfaster",
    "#/run/shop?smooth=0.5&log=1&env=sums",
    "#/run/shop?m=optim%2Fentropy",
    "#/compare/shop,faster?smooth=0.4",
    "#/run/shop/step/4",
    "#/run/shop/step/4?env=sums&sort=failures&mixed=1",
    "#/run/shop/step/4?status=completed&low=0.5&high=1&taught=1&cut=1&task=1",
    "#/run/shop/step/4?text=sure",
    "#/run/shop/step/4/group/0",
    "#/run/shop/step/4/group/0?diff=0.0%2C1.0",
    "#/run/shop/step/4/episode/0/0/0",
    "#/run/shop/step/4/episode/0/0/0?view=tokens&colour=logprob&turn=1",
    "#/run/shop/tasks?sort=change&q=tea&unsolved=1",
    "#/run/shop/task/shop/cheapest%20tea?against=faster",
    "#/run/shop/evaluations?at=4&q=2&order=better",
    "#/run/shop/evaluation/4",
    "#/run/shop/evaluation/4/group/1",
    "#/run/shop/evaluation/4/episode/1/0/0",
)

CONTROLS = """() => [...document.querySelectorAll("#main input, #main select")]
.map((one) => one.type === "checkbox" ? one.checked : one.value)"""


def settle(visit: Visit) -> tuple[str, str, list[Any]]:
    """Return the address, the text and the values of the controls, once charts have drawn their legends."""
    visit.page.wait_for_function(
        "() => [...document.querySelectorAll('#main .chart .plot')].every((plot) => plot.querySelector('canvas'))"
    )
    text = re.sub(r"\d+ (min|s|h) ago|just now", "", visit.text())
    return visit.hash, text, visit.page.evaluate(CONTROLS)


@pytest.mark.parametrize("state", STATES)
def test_an_address_gives_the_same_page_again(visit: Visit, state: str) -> None:
    visit.open(state)
    before = settle(visit)
    assert before[0] == state
    visit.page.reload()
    visit.wait()
    assert settle(visit) == before
    visit.check()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("#/?q=faster", "#/?q=shop&sort=reward"),
        ("#/run/shop?smooth=0.5&log=1", "#/run/shop?env=sums"),
        ("#/run/shop/step/4?env=sums&mixed=1", "#/run/shop/step/4?env=shop&sort=failures"),
        ("#/run/shop/step/4/group/0?diff=0.0%2C1.0", "#/run/shop/step/4/group/0?diff=2.0%2C3.0"),
        (
            "#/run/shop/step/4/episode/0/0/0?view=tokens&colour=gap",
            "#/run/shop/step/4/episode/0/0/0?view=tokens&colour=mask",
        ),
        ("#/run/shop/tasks?q=tea", "#/run/shop/tasks?sort=change"),
        ("#/run/shop/evaluations?at=4&q=2", "#/run/shop/evaluations?at=8&order=better"),
    ],
)
def test_another_address_of_the_same_page_changes_its_controls(visit: Visit, before: str, after: str) -> None:
    visit.open(after)
    expected = settle(visit)
    visit.open(before)
    assert settle(visit)[2] != expected[2]
    visit.page.goto(visit.link + after)  # as typed into the bar: the page is not loaded again
    visit.wait()
    assert settle(visit) == expected
    visit.check()


def test_back_and_forward_go_through_the_pages(visit: Visit) -> None:
    visit.open()
    visit.page.get_by_role("link", name="shop", exact=True).click()
    visit.wait_for_hash("^#/run/shop$")
    visit.page.get_by_role("link", name="Steps", exact=True).click()
    visit.wait_for_hash("^#/run/shop/step/12$")
    visit.page.go_back()
    visit.wait_for_hash("^#/run/shop$")
    visit.page.go_forward()
    visit.wait_for_hash("^#/run/shop/step/12$")
    assert visit.texts("h1") == ["Step 12"]
    visit.check()


def test_runs_can_be_searched_and_sorted(visit: Visit) -> None:
    visit.open()
    visit.page.get_by_label("Search").fill("faster completed")
    visit.wait_until(lambda: len(visit.rows()) == 1)
    assert visit.rows()[0][1].startswith("faster")
    visit.page.get_by_label("Search").fill("nothing of this name")
    visit.page.get_by_text("No run matches.").wait_for()
    visit.page.get_by_label("Search").fill("")
    visit.wait_until(lambda: len(visit.rows()) > 1)
    visit.page.get_by_label("Sort").select_option("name")
    visit.wait_for_hash("sort=name")
    names = [row[1].split()[0] for row in visit.rows()]
    assert names == sorted(names)
    visit.check()


def test_groups_can_be_filtered(visit: Visit, runs: Path) -> None:
    step, _ = find_episode(runs, "shop", status="failed")
    table = read_step(runs / "shop", step)
    final = table[table.final]
    visit.open(f"#/run/shop/step/{step}")

    def positions() -> set[int]:
        return {int(row[0]) for row in visit.rows() if row[0].isdigit()}

    def expect(chosen: Any) -> None:
        expected = set(final[chosen].position)
        visit.wait_until(lambda: positions() == expected)
        assert f"{len(expected)} group" in visit.text(".lead[role=status]")

    visit.page.get_by_label("Environment").select_option("shop")
    expect(final.env == "shop")
    visit.page.get_by_label("Environment").select_option("")
    visit.page.get_by_label("Status").select_option("failed")
    expect(final.status == "failed")
    visit.page.get_by_label("Status").select_option("")
    visit.page.get_by_label("Reward from").fill("0.5")
    expect(final.reward >= 0.5)
    visit.page.get_by_label("Reward from").fill("")
    task = final.task.iloc[0]
    visit.page.get_by_label("Task").fill(task)
    expect(final.task == task)
    visit.page.get_by_label("Task").fill("")
    visit.page.get_by_label("Mixed").check()
    spread = final.groupby("position").reward.nunique() > 1
    expect(final.position.map(spread))
    visit.page.get_by_label("Mixed").uncheck()
    visit.page.get_by_label("Text in replies").fill("% SURE")
    expect((final.env == "shop") & final.position.isin(table[table.status != "failed"].position))
    assert "% sure" in visit.text()
    visit.check()


def test_failures_come_first_when_they_are_asked_for(visit: Visit, runs: Path) -> None:
    step, row = find_episode(runs, "shop", status="failed")
    visit.open(f"#/run/shop/step/{step}?sort=failures")
    assert visit.rows()[0][0] == str(row["position"])
    visit.open(f"#/run/shop/step/{step}?sort=mean")
    means = [float(row[3]) for row in visit.rows()]
    assert means == sorted(means)
    visit.check()


def press(visit: Visit, key: str, pattern: str) -> None:
    """Press a key, and wait until the page that it leads to is drawn."""
    before = visit.hash
    visit.page.keyboard.press(key)
    visit.page.wait_for_function("(before) => location.hash !== before", arg=before)
    visit.page.evaluate("() => new Promise((resolve) => setTimeout(resolve))")  # the page is busy from the event on
    visit.wait_for_hash(pattern)


def test_the_keyboard_alone_goes_down_to_an_episode_and_up_again(visit: Visit) -> None:
    visit.open("#/?sort=name&q=shop")  # the environment of both runs
    keys = visit.page.keyboard
    keys.press("j")
    keys.press("j")
    press(visit, "Enter", "^#/run/shop$")
    visit.open("#/run/shop/step/3")
    keys.press("j")
    keys.press("j")
    keys.press("k")
    keys.press("j")
    press(visit, "Enter", "^#/run/shop/step/3/group/1$")
    press(visit, "]", "group/2$")
    press(visit, "[", "group/1$")
    keys.press("j")
    press(visit, "Enter", r"^#/run/shop/step/3/episode/1/\d+/\d+$")
    first = visit.hash
    press(visit, "]", r"^#/run/shop/step/3/episode/\d+/\d+/\d+$")
    press(visit, "[", f"^{first}$")
    for place in ("^#/run/shop/step/3/group/1$", "^#/run/shop/step/3$", "^#/run/shop$", r"^#/(\?.*)?$"):
        press(visit, "u", place)
    visit.check()


def test_keys_move_to_neighbour_steps_and_tokens(visit: Visit, runs: Path) -> None:
    visit.open("#/run/shop/step/3")
    press(visit, "]", "step/4$")
    press(visit, "[", "step/3$")
    step, row = find_episode(runs, "sums", status="completed")
    visit.open(episode_hash(step, row, "?view=tokens"))
    visit.page.locator(".tokens").focus()
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("ArrowLeft")
    assert visit.page.locator(".tokens .chunk span").first.get_attribute("class").split()[-1] == "active"
    assert visit.page.locator(".tokens span.active").count() == 1
    assert "id" in visit.text(".token-details")
    visit.check()


def test_keys_search_help_and_select(visit: Visit) -> None:
    visit.open()
    keys = visit.page.keyboard
    keys.press("/")
    keys.type("fast?j")  # letters in a field are letters
    visit.wait_for_hash("q=fast%3Fj")
    visit.page.get_by_label("Search").fill("")
    visit.wait_until(lambda: "q=" not in visit.hash)
    visit.page.locator("h1").click()
    keys.press("?")
    visit.page.get_by_role("dialog").wait_for()
    assert "next / previous row" in visit.text("dialog")
    keys.press("Escape")
    visit.page.wait_for_function("() => !document.querySelector('dialog[open]')")
    keys.press("j")
    keys.press("x")
    visit.wait_for_hash("select=")
    keys.press("j")
    keys.press("x")
    visit.wait_for_hash("select=[^&]*%2C")
    visit.page.get_by_role("link", name="Compare").wait_for()
    visit.check()


def test_escape_leaves_the_search_for_the_rows(visit: Visit) -> None:
    visit.open()
    keys = visit.page.keyboard
    keys.press("/")
    keys.type("faster")
    visit.wait_for_hash("q=faster")
    visit.wait_until(lambda: [row[1].split()[0] for row in visit.rows()] == ["faster"])
    keys.press("Escape")
    keys.press("j")
    keys.press("Enter")
    visit.wait_for_hash("^#/run/faster$")
    visit.check()


@pytest.mark.parametrize("view", ["", "view=tokens&"])
def test_a_link_to_a_turn_shows_its_heading(visit: Visit, runs: Path, view: str) -> None:
    step, row = find_episode(runs, "shop", reward=1.0)
    visit.page.set_viewport_size({"width": WIDTH, "height": 400})
    visit.open(episode_hash(step, row, f"?{view}turn=1"))
    visit.wait_until(lambda: visit.page.evaluate(HEADING) == "Turn 2")
    visit.check()


def test_the_tab_key_shows_where_it_is(visit: Visit) -> None:
    visit.open("#/run/shop")
    outlines = list[bool]()
    for _ in range(12):
        visit.page.keyboard.press("Tab")
        outlines.append(
            visit.page.evaluate(
                "() => { const style = getComputedStyle(document.activeElement);"
                " return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0; }"
            )
        )
    assert all(outlines)


@pytest.mark.parametrize(
    "hash_",
    ["#/none", "#/run/none", "#/run/shop/step/99", "#/run/shop/step/1/group/99", "#/run/shop/step/1/episode/0/9/0"],
)
def test_a_place_that_does_not_exist_says_so(visit_link: Callable[..., Visit], link: str, hash_: str) -> None:
    visit = visit_link(link)
    visit.open(hash_)
    assert "Not found" in visit.text()
    visit.page.get_by_role("link", name="All runs", exact=True).click()
    visit.page.get_by_role("heading", name="Runs").wait_for()
    assert all("404" in problem for problem in visit.problems)


def test_a_comparison_with_an_unknown_run_shows_the_others(visit_link: Callable[..., Visit], link: str) -> None:
    visit = visit_link(link)
    visit.open("#/compare/shop,none,faster")
    assert "there is no run 'none'" in visit.text()
    assert visit.page.locator("main tbody").first.locator("tr").count() == 2
    assert visit.texts(".chart .legend")[0].startswith("shop")
    assert all("404" in problem for problem in visit.problems)


def test_a_task_against_an_unknown_run_is_shown_with_the_reason(visit_link: Callable[..., Visit], link: str) -> None:
    visit = visit_link(link)
    visit.open("#/run/shop/task/shop/cheapest%20tea?against=nosuch")
    assert "there is no run 'nosuch'" in visit.text()
    assert visit.texts("h1") == ["cheapest tea"]
    assert visit.page.get_by_label("Compare with").input_value() == ""
    assert visit.rows()
    assert all("404" in problem for problem in visit.problems)


def test_a_link_without_its_token_says_what_to_do(visit_link: Callable[..., Visit], runs: Path) -> None:
    with serve(runs) as link:
        for wrong in (link.partition("?")[0], f"{link.partition('=')[0]}=wrong"):
            visit = visit_link(wrong)
            visit.open()
            assert "rlkit view" in visit.text()
            assert "token" in visit.text()
            assert "shop" not in visit.text()
