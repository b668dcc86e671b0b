"""A hook of mkdocs: the configuration reference is made from the schema whenever the pages are built."""

from __future__ import annotations

from mkdocs.structure.pages import Page

from rlkit.config import reference_markdown

MARK = "<!-- reference -->"


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Put the reference in the place of the mark."""
    if page.file.src_uri != "configuration.md":
        return markdown
    if MARK not in markdown:
        raise ValueError(f"{page.file.src_uri} has lost the line {MARK}")
    return markdown.replace(MARK, reference_markdown())
