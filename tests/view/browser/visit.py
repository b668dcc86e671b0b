"""A visit of the pages in a browser that records what must not happen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

WAIT_MS = 60_000
"""Ends a hang."""

NEXT_TASK = "() => new Promise((resolve) => setTimeout(resolve))"

READY = """() => {
  const main = document.querySelector("#main");
  return main && !main.hasAttribute("aria-busy") && main.querySelector("h1") !== null;
}"""

WATCH = """
addEventListener("securitypolicyviolation", (event) => console.error("CSP", event.violatedDirective, event.blockedURI));
"""

TEXTS = """(elements) => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync("* { content-visibility: visible !important }");
  document.adoptedStyleSheets.push(sheet);
  const texts = elements.map((element) => element.innerText);
  document.adoptedStyleSheets.pop();
  return texts.map((text) => text.replace(/\\s+/g, " "));
}"""
"""Texts of elements, with what the browser has not laid out yet: that depends on the frame and on the scroll."""

OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Visit:
    """A page of the browser.

    Args:
        page: of Playwright.
        link: address of the list of runs.
    """

    def __init__(self, page: Any, link: str) -> None:
        self.page = page
        self.link = link
        self.problems: list[str] = []
        self.host = urlsplit(link).netloc
        page.set_default_timeout(WAIT_MS)
        page.add_init_script(WATCH)
        page.on("console", self._note_console)
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("dialog", self._note_dialog)
        page.on("popup", lambda popup: self.problems.append(f"popup: {popup.url}"))
        page.on("request", self._note_request)

    def _note_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def _note_dialog(self, dialog: Any) -> None:
        self.problems.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _note_request(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != self.host:
            self.problems.append(f"request: {request.url}")

    def open(self, hash_: str = "#/") -> Visit:
        """Go to a page, as from a link."""
        self.page.goto(self.link + hash_)
        return self.wait()

    def wait(self) -> Visit:
        """Wait until the page is drawn."""
        # The address changes before the page hears of it and marks itself busy: a task later it has.
        self.page.evaluate(NEXT_TASK)
        self.page.wait_for_function(READY)
        return self

    def wait_for_hash(self, pattern: str) -> Visit:
        """Wait until the address has a hash."""
        self.page.wait_for_function("(pattern) => new RegExp(pattern).test(location.hash)", arg=pattern)
        return self.wait()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition about the page holds."""
        end_s = time.monotonic() + WAIT_MS / 1000
        while not condition():
            assert time.monotonic() < end_s, self.text("body")[:2000]
            self.page.wait_for_timeout(20)

    @property
    def hash(self) -> str:
        """The state in the address."""
        return self.page.evaluate("location.hash")

    def text(self, selector: str = "#main") -> str:
        """Return the text that people see, on the screen or off it, with each run of white space as one space."""
        return self.page.locator(selector).first.evaluate(f"(element) => ({TEXTS})([element])[0]")

    def texts(self, selector: str) -> list[str]:
        """Return the text of each element, as `text`."""
        return [text.strip() for text in self.page.locator(selector).evaluate_all(TEXTS)]

    def facts(self) -> dict[str, str]:
        """Return the terms and values of the definition lists, the first of each term."""
        pairs = self.page.evaluate(
            "() => [...document.querySelectorAll('#main dl.facts > div')]"
            ".map((row) => [row.querySelector('dt').innerText, row.querySelector('dd').innerText])"
        )
        return dict(reversed(pairs))

    def rows(self) -> list[list[str]]:
        """Return the cells of the first table."""
        script = (
            "() => [...document.querySelectorAll('#main table')][0].tBodies[0].rows.length === 0 ? [] : "
            "[...document.querySelector('#main table').tBodies[0].rows].filter((row) => row.cells.length)"
            ".map((row) => [...row.cells].map((cell) => cell.innerText.replace(/\\s+/g, ' ').trim()))"
        )
        return self.page.evaluate(script)

    def overflow_px(self) -> int:
        """Return by how much the page is wider than the window."""
        return self.page.evaluate(OVERFLOW)

    def check(self) -> None:
        """Assert that nothing happened that must not."""
        pwned = [frame.evaluate("() => window.pwned ?? null") for frame in self.page.frames]
        assert pwned == [None] * len(pwned), "a text ran as a script"
        assert self.problems == [], json.dumps(self.problems[:5], indent=1)
