"""Draw what a command prints, or what it shows on a terminal at some time, as a picture.

python scripts/draw_terminal.py --out docs/assets/conformance.svg --width 110 -- rlkit check service --quick

The second form needs tmux. It draws the panel of a run once it shows a text:

python scripts/draw_terminal.py --out docs/assets/panel.svg --until "step 12/20" --start "╭" -- \\
    rlkit train examples/arithmetic.yaml
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

POLL_S = 0.2
SCREEN_LINES = 60


def print_output(command: list[str], width: int) -> str:
    """Return the standard output of a command, with its colours."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(width), "TERM": "xterm-256color"}
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return done.stdout.decode(errors="replace")


def capture_screen(command: list[str], width: int, until: str) -> str:
    """Return the screen of a command once it matches a pattern, with its colours; then stop the command."""
    tmux = ["tmux", "-L", f"draw-{os.getpid()}"]

    def capture(*options: str) -> str:
        return subprocess.run(
            [*tmux, "capture-pane", "-p", *options], check=True, capture_output=True, text=True
        ).stdout

    size = ["-x", str(width), "-y", str(SCREEN_LINES)]
    subprocess.run([*tmux, "new-session", "-d", *size, shlex.join(command)], check=True)
    try:
        while not re.search(until, capture()):
            time.sleep(POLL_S)
        return capture("-e")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def draw(lines: list[str], *, title: str, width: int, head: int | None, out: Path) -> None:
    """Write lines of a terminal, or the first `head` of them, as SVG."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    if title:
        console.print(Text(f"$ {title}", style="bold"))
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
    parser.add_argument("--until", help="show the screen once it matches this regular expression")
    parser.add_argument("--start", help="show the screen from the last line with this text on, without the command")
    parser.add_argument("--out", type=Path, required=True, help="output file, .svg")
    arguments = parser.parse_args()
    command, width, title = arguments.command, arguments.width, shlex.join(arguments.command)
    shown = print_output(command, width) if arguments.until is None else capture_screen(command, width, arguments.until)
    lines = shown.rstrip().splitlines()
    if arguments.start is not None:
        first = max(number for number, line in enumerate(lines) if arguments.start in line)
        lines, title = lines[first:], ""
    draw(lines, title=title, width=width, head=arguments.head, out=arguments.out)


if __name__ == "__main__":
    main()
