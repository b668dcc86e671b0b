"""A hook of mkdocs: the configuration reference from the schema, and the order of what the search finds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import groupby

from mkdocs.structure.pages import Page

from rlkit.config.loading.outline import Field, Shape, outline

MARK = "<!-- reference -->"

BOOSTS = {
    "runs.md": 2,
    "migrating/": 0.1,
    "options.md": 0.1,
    "reference.md": 0.3,
    "comparison.md": 0.3,
    "tutorials/": 0.5,
}
"""Weight in the search by the beginning of a page's path; 1 is the weight of a guide."""


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Set the page's weight in the search, and replace the mark in `configuration.md` by the reference."""
    boost = next((boost for path, boost in BOOSTS.items() if page.file.src_uri.startswith(path)), 1)
    page.meta["search"] = {"boost": boost}
    if page.file.src_uri != "configuration.md":
        return markdown
    if MARK not in markdown:
        raise ValueError(f"{page.file.src_uri} has no line {MARK}")
    return markdown.replace(MARK, reference_markdown())


def reference_markdown() -> str:
    """Return Markdown tables of all fields: key, type, default and description."""
    return "\n".join(_section("", outline())).rstrip() + "\n"


def _section(path: str, shape: Shape, *, heading: str = "") -> Iterator[str]:
    if path:
        yield f"## {heading or f'`{path}`'}\n"
        yield f"{shape.description}\n"
    rows = {name: field for name, field in shape.fields.items() if not _has_page(path, name, field.shape)}
    if rows:
        yield "| key | type | default | |"
        yield "| --- | --- | --- | --- |"
        yield from _rows(path, rows)
        yield ""
    for name, field in shape.fields.items():
        if not _has_page(path, name, field.shape):
            continue
        key = f"{path}.{name}" if path else name
        if field.shape.choices and field.description:
            yield f"## `{key}`\n"
            yield f"{field.description}\n"
        yield from _pages(key, field.shape)


def _pages(path: str, shape: Shape) -> Iterator[str]:
    if shape.fields:
        yield from _section(path, shape)
    elif shape.entries is not None and shape.entries.fields:
        yield from _section(f"{path}.<name>", shape.entries)
    for _, same in groupby(shape.choices.items(), key=lambda item: id(item[1])):
        (tag, choice), *others = same
        yield from _section(
            path, choice, heading=f"`{path}` with `{next(iter(choice.fields))}: {tag}`{', …' if others else ''}"
        )


def _has_page(path: str, name: str, shape: Shape) -> bool:
    # A section whose null means "inherited" is described where it is inherited from.
    inherited = path and shape.nullable and name in outline().fields
    return not inherited and bool(shape.fields or shape.choices or (shape.entries and shape.entries.fields))


def _rows(path: str, fields: Mapping[str, Field]) -> Iterator[str]:
    for name, field in fields.items():
        key = f"{path}.{name}" if path else name
        default = "required" if field.required else f"`{json.dumps(field.default)}`"
        text = field.description.replace("|", "\\|")
        yield f"| `{key}` | {field.shape.type} | {default} | {text} |"
