"""The command lines of documentation pages, as their readers copy them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def fenced_commands(page: Path) -> list[list[str]]:
    """The commands of a page's blocks, each as its words; a line that ends in a backslash goes on."""
    blocks = [body.replace("\\\n", " ") for _, body in FENCE.findall(page.read_text())]
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("rlkit ")]
