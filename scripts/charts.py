"""Output of the charts of the documentation, for the scripts that draw them."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import matplotlib as mpl

mpl.use("agg")

from matplotlib.figure import Figure


def save_chart(draw: Callable[[], Figure], description: str | None) -> None:
    """Draw a chart to the SVG that `--out` names, without its date, so that an equal chart is an equal file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="path of the SVG")
    out = parser.parse_args().out
    mpl.rcParams.update(
        {"svg.hashsalt": "rlkit", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    draw().savefig(out, metadata={"Date": None})
