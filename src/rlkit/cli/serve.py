"""`rlkit serve`."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from rlkit.cli.common.output import Output
from rlkit.cli.common.signals import graceful
from rlkit.config.schema import DEFAULT_MODEL

LOOPBACK = ("127.0.0.1", "localhost")


class EngineOptions(TypedDict):
    """What `rlkit.engine.EngineServer` is told."""

    host: str
    port: int
    threads: int | None
    device: str | None
    root: Path | None
    models: Sequence[str]


def run(output: Output, options: EngineOptions) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code."""
    from rlkit.engine import EngineServer
    from rlkit.engine.model.models import resolve_model

    engine = EngineServer(**options)  # before models are fetched: it refuses what cannot be served
    for model in options["models"]:
        directory = resolve_model(model, progress=lambda message, _: output.note(message))
        output.note(f"model {model} is ready: {directory}")
    ended = threading.Event()
    with graceful(ended.set, output.note, message="stopping"), engine:
        _announce(output, url=engine.url, key=engine.api_key)
        if options["host"] not in LOOPBACK:
            output.note("other machines can reach it, and the key travels unencrypted: use a trusted network")
        ended.wait()
    return 0


def _announce(output: Output, *, url: str, key: str) -> None:
    if output.json:
        output.data({"url": url, "api_key": key})
        return
    output.line(f"export TINKER_BASE_URL={shlex.quote(url)}")
    output.line(f"export TINKER_API_KEY={shlex.quote(key)}")
    output.note("run these two lines in another shell: they point any Tinker program at the engine")
    output.note(f"its base_model is a folder or a name on the Hugging Face hub, such as {DEFAULT_MODEL}")
    output.note("Ctrl-C stops the engine")
