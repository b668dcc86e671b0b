"""An extension of griffe: `::` before an example in a docstring becomes a colon, or nothing where it stands alone."""

from __future__ import annotations

import re

import griffe


class ExampleMarks(griffe.Extension):
    """Docstrings mark examples as plain text does; Markdown has no such mark."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Read the docstring of each object that is documented."""
        if obj.docstring is not None:
            text = re.sub(r"^\s*::$", "", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
