"""An extension of griffe that replaces `::` before an example in a docstring by a colon, or removes a lone `::`."""

from __future__ import annotations

import re

import griffe


class ExampleMarks(griffe.Extension):
    """Convert the `::` marks of docstrings, which Markdown does not have."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Convert the docstring of a documented object."""
        if obj.docstring is not None:
            text = re.sub(r"^\s*::$", "", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
