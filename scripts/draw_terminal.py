"""Draw what a command prints as a picture of a terminal.

python scripts/draw_terminal.py --out docs/assets/conformance.svg --width 110 -- rlkit check service --quick
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text


def draw(command: list[str], *, width: int, head: int | None, out: Path) -> None:
    """Run a command and write its standard output, or the first `head` lines of it, as SVG."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(width), "TERM": "xterm-256color"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    lines = done.stdout.decode(errors="replace").rstrip().splitlines()
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    console.print(Text.from_ansi("\n".join(lines[:head])))
    if head is not None and head < len(lines):
        console.print(Text(f"… {len(lines) - head} more lines", style="dim"))
    svg = console.export_svg(title="", theme=MONOKAI, unique_id="terminal")
    # A page loads nothing from elsewhere, so the reader's own font is used.
    svg = re.sub(r"@font-face\s*\{.*?\}", "", svg, flags=re.DOTALL).replace("Fira Code", "ui-monospace")
    out.write_text(svg)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="+", help="command with its arguments, after --")
    parser.add_argument("--width", type=int, default=100, help="columns of the terminal")
    parser.add_argument("--head", type=int, help="number of lines to show; all by default")
    parser.add_argument("--out", type=Path, required=True, help="output file, .svg")
    arguments = parser.parse_args()
    draw(arguments.command, width=arguments.width, head=arguments.head, out=arguments.out)


if __name__ == "__main__":
    main()
