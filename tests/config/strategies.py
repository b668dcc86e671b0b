"""Hypothesis strategies for the tests of configurations."""

from __future__ import annotations

from hypothesis import strategies as st

KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
)


def json_values() -> st.SearchStrategy[object]:
    """Any JSON value."""
    return st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
