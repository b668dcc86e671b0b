"""The command lines of documentation pages, as their readers copy them."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Sequence
from pathlib import Path

from rlkit.config.loading.arguments import bind
from rlkit.config.loading.load import load_config, split_arguments
from rlkit.config.loading.objects import BUILT_IN, load_object
from rlkit.config.schema import Config

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def reference_markdown() -> str:
    """The tables of all fields, as `scripts/docs_hook.py` puts them into their page."""
    return runpy.run_path(str(ROOT / "scripts" / "docs_hook.py"))["reference_markdown"]()


def fenced_commands(page: Path) -> list[list[str]]:
    """The commands of a page's blocks, each as its words; a line that ends in a backslash goes on."""
    blocks = [body.replace("\\\n", " ") for _, body in FENCE.findall(page.read_text())]
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("rlkit ")]


def run_of(words: Sequence[str]) -> Config:
    """The configuration that the words of `rlkit train` name; its environments exist and take their arguments.

    They are not made: that would want the network, keys, and what the user has on the disk.
    """
    files, values = split_arguments([word for word in words if word.startswith("examples/") or "=" in word])
    config = load_config(files, values).config
    for section, specs in (("envs", config.envs), ("eval.envs", config.eval.envs)):
        for name, spec in specs.items():
            field, kind = f"{section}.{name}", spec.env or name
            assert kind in BUILT_IN, f"{field}: there is no environment {kind!r}"
            function = load_object(BUILT_IN[kind], field=field)
            assert callable(function)
            bind(function, spec.args, field=f"{field}.args", defaults={}, load=load_object)
    return config
