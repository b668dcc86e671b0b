"""The pages can be read in narrow windows, in the dark, with a screen reader, and in pictures."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.view.browser.conftest import ROOT, can_search, serve
from tests.view.browser.test_pages import episode_hash, find_episode, read_step
from tests.view.browser.visit import Visit

PAGES = (
    "runs", "run", "compare", "step", "group", "difference", "episode", "tokens", "files", "renderer", "tasks", "task",
    "evaluations", "evaluation", "discovery",
)  # fmt: skip
SHORTEN = """(names) => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode())
    for (const [name, short] of names) if (node.data.includes(name)) node.data = node.data.replaceAll(name, short);
}"""
"""Replace folders of this machine by those of a reader."""

PICTURE_BYTES = 1_200_000
"""Most that the pictures of the documentation may have together."""


def find_hash(runs: Path, page: str) -> str:
    """Return the address of an example of a page."""
    if page == "discovery" and not can_search():
        pytest.skip("programs of a search would not be kept apart")
    step, sums = find_episode(runs, "sums", status="completed", reward=1.0, counts=True)
    shop_step, shop = find_episode(runs, "shop", status="completed", reward=1.0)
    for mixed_step in range(2, 13):
        table = read_step(runs / "shop", mixed_step)
        table = table[(table.env == "shop") & table.final]
        mixed = [position for position, group in table.groupby("position") if group.reward.nunique() > 1]
        if mixed:
            break
    group = f"#/run/shop/step/{mixed_step}/group/{mixed[0]}"
    final = table[(table.position == mixed[0]) & (table.status != "failed")].sort_values("reward")
    pair = [f"{final.member.iloc[place]}.{final.attempt.iloc[place]}" for place in (-1, 0)]
    return {
        "runs": "#/",
        "run": "#/run/shop",
        "compare": "#/compare/shop,faster",
        "step": f"#/run/shop/step/{mixed_step}",
        "group": group,
        "difference": f"{group}?diff={pair[0]}%2C{pair[1]}",
        "episode": episode_hash(shop_step, shop),
        "tokens": episode_hash(step, sums, "?view=tokens&colour=logprob"),
        "files": episode_hash(shop_step, shop, "?view=files"),
        "renderer": episode_hash(step, sums, "?view=env"),
        "tasks": "#/run/shop/tasks",
        "task": "#/run/shop/task/shop/cheapest%20tea?against=faster",
        "evaluations": "#/run/shop/evaluations",
        "evaluation": "#/run/shop/evaluation/4",
        "discovery": "#/run/erdos/discovery",
    }[page]


def settle(visit: Visit) -> None:
    """Wait until charts, files and frames are drawn."""
    visit.page.wait_for_function(
        "() => [...document.querySelectorAll('#main .chart .plot')].every((plot) => plot.querySelector('canvas'))"
    )
    visit.page.wait_for_function("() => !document.querySelector('#main').innerText.includes('Loading…')")
    for frame in visit.page.frames[1:]:
        frame.wait_for_function("() => document.body?.childNodes.length > 0")


@pytest.fixture(scope="module")
def axe() -> str:
    """Source of axe-core."""
    spec = find_spec("axe_playwright_python")
    if spec is None or spec.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    return (Path(spec.origin).parent / "axe.min.js").read_text()


@pytest.mark.rotated
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_no_page_has_a_serious_fault_for_screen_readers(
    visit_link: Callable[..., Visit], link: str, runs: Path, axe: str, page: str, scheme: str
) -> None:
    visit = visit_link(link, scheme=scheme)
    visit.open(find_hash(runs, page))
    settle(visit)
    visit.page.evaluate(axe)
    result: dict[str, Any] = visit.page.evaluate("() => axe.run()")
    assert result["passes"]
    serious = [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in result["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"][:3]
    ]
    assert serious == []
    visit.check()


@pytest.mark.rotated
@pytest.mark.parametrize("width", [800, 1280])
@pytest.mark.parametrize("page", PAGES)
def test_no_page_is_wider_than_the_window(
    visit_link: Callable[..., Visit], link: str, runs: Path, page: str, width: int
) -> None:
    visit = visit_link(link, width=width)
    visit.open(find_hash(runs, page))
    settle(visit)
    assert visit.overflow_px() <= 0
    names = visit.page.evaluate(
        "() => [...document.querySelectorAll('#main input, #main select, #main button, header a, header button')]"
        ".filter((one) => { const box = one.getBoundingClientRect();"
        " const isFramed = one.closest('.table-frame, .columns, .hidden');"
        " return box.width && !isFramed && (box.left < 0 || box.right > innerWidth); })"
        ".map((one) => one.outerHTML)"
    )
    assert names == []
    visit.check()


LINES = """(selector) => [...document.querySelectorAll(selector)]
.map((one) => [one.textContent, one.getClientRects().length])"""
"""Text of each element, and its number of lines."""


def test_short_names_are_not_broken(visit_link: Callable[..., Visit], link: str, runs: Path) -> None:
    pair = visit_link(link)
    pair.open(find_hash(runs, "task"))
    with serve(ROOT / "tests" / "data" / "view" / "inspect.eval") as other_link:
        log = visit_link(other_link, width=800)
        log.open("#/run/inspect.eval")
        for visit, selector in ((pair, ".sides .row-link"), (log, "th.mono bdi")):
            lines = visit.page.evaluate(LINES, selector)
            assert lines
            assert [name for name, count in lines if count > 1] == []
            visit.check()


def background(visit: Visit) -> list[int]:
    """Return the colour behind the page, as red, green and blue."""
    colour = visit.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    return [int(float(number)) for number in colour.removeprefix("rgb").strip("a()").split(",")[:3]]


def test_colours_follow_the_system_and_can_be_chosen(visit_link: Callable[..., Visit], link: str) -> None:
    light, dark = visit_link(link), visit_link(link, scheme="dark")
    light.open("#/run/shop")
    dark.open("#/run/shop")
    assert min(background(light)) > 200
    assert max(background(dark)) < 80
    light.page.get_by_role("button", name="Colours: auto").click()
    light.page.get_by_role("button", name="Colours: light").click()
    light.page.get_by_role("button", name="Colours: dark").wait_for()
    assert max(background(light)) < 80
    light.page.reload()
    light.wait()
    assert max(background(light)) < 80  # the choice is kept
    light.page.keyboard.press("t")
    assert min(background(light)) > 200
    light.check()
    dark.check()


@pytest.mark.parametrize("page", PAGES)
def test_each_page_has_its_picture(
    visit_link: Callable[..., Visit], link: str, runs: Path, tmp_path: Path, page: str
) -> None:
    """Set RLKIT_PICTURES=1 to write the pictures of the documentation."""
    visit = visit_link(link, scheme="dark" if page == "tokens" else "light")
    visit.open(find_hash(runs, page))
    settle(visit)
    visit.page.evaluate(SHORTEN, [[str(runs), "~/rlkit-runs"], [str(ROOT), "~/rlkit"]])
    path = tmp_path / f"{page}.png"
    visit.page.screenshot(path=str(path))
    image = pytest.importorskip("PIL.Image").open(path)
    assert image.size == (1280, 800)
    assert len(image.convert("RGB").getcolors(1 << 24)) > 30, "an empty page"
    if os.environ.get("RLKIT_PICTURES"):
        image.convert("RGB").quantize(64).save(ROOT / "docs" / "assets" / "view" / f"{page}.png", optimize=True)


def test_the_pictures_of_the_documentation_are_small() -> None:
    paths = list((ROOT / "docs" / "assets" / "view").glob("*.png"))
    assert {path.stem for path in paths} == set(PAGES)
    assert sum(path.stat().st_size for path in paths) <= PICTURE_BYTES
