"""A hook of mkdocs that generates the configuration reference from the schema when the pages are built."""

from __future__ import annotations

from mkdocs.structure.pages import Page

from rlkit.config.reference.describe import reference_markdown

MARK = "<!-- reference -->"


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Replace the mark in `configuration.md` by the reference."""
    if page.file.src_uri != "configuration.md":
        return markdown
    if MARK not in markdown:
        raise ValueError(f"{page.file.src_uri} has no line {MARK}")
    return markdown.replace(MARK, reference_markdown())
