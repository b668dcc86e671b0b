"""Output of a command.

Invariant: results go to stdout, everything else to stderr. Neither shows the value of a secret environment variable. A
closed pipe is not an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from rlkit._util.redaction import redact
from rlkit.errors import DISTRIBUTION, UsageError

type Data = bool | int | float | str | Sequence[Data] | Mapping[str, Data] | None

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def sanitise(text: str) -> str:
    """Remove secrets from `text`, and replace terminal control characters by `?`."""
    return _CONTROL.sub("?", redact(text).replace("\r\n", "\n"))


def to_json(value: Data) -> str:
    """Return one line of strict JSON: secrets are removed; NaN and infinities become null."""
    from rlkit._util.json_values import map_text

    text = json.dumps(map_text(value, redact, keys=True))
    return json.dumps(json.loads(text, parse_constant=lambda constant: None), ensure_ascii=False)


def is_redrawable(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `stream` is a terminal that can be redrawn."""
    return stream.isatty() and environ.get("TERM") != "dumb"


def has_colours(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether `stream` is a terminal that accepts colours (no-color.org)."""
    return is_redrawable(stream, environ) and not environ.get("NO_COLOR")


@dataclass(frozen=True, slots=True)
class Output:
    """Output streams of one command: `out` for results (as JSON if `json` is true), `err` for everything else."""

    out: TextIO
    err: TextIO
    json: bool = False

    def line(self, text: str = "") -> None:
        """Print a line of a result."""
        _write(self.out, sanitise(text))

    def result(self, data: Data, text: str) -> None:
        """Print the result as text, or as JSON with `--json`."""
        if self.json:
            self.data(data)
        else:
            self.line(text)

    def wrap(self, text: str) -> str:
        """Break lines between words at the width of the terminal, if results go to one; words are not broken."""
        if not self.out.isatty():
            return text
        width = shutil.get_terminal_size().columns
        wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(map(wrapper.fill, sanitise(text).splitlines()))

    def data(self, value: Data) -> None:
        """Print a result as one line of JSON."""
        _write(self.out, to_json(value))

    def note(self, text: str) -> None:
        """Print a message for people."""
        _write(self.err, sanitise(text))

    def silent(self, text: str) -> None:
        """Print nothing; replaces `note` with `--quiet`."""

    def confirm(self, question: str) -> bool:
        """Ask a question, and return whether the answer is yes; raise `UsageError` if nobody can answer."""
        if self.json or not sys.stdin.isatty():
            raise UsageError(f"{question} Nobody can answer without a terminal: add --yes")
        self.err.write(f"{question} [y/N] ")
        self.err.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")

    def failure(self, text: str, *, kind: str, exit_code: int) -> None:
        """Print the error that ended the command; with `--json`, also as a JSON object."""
        self.error(text)
        if self.json:
            with suppress(OSError):  # stdout may be what failed
                self.data({"error": text, "type": kind, "exit_code": exit_code})

    def error(self, text: str) -> None:
        """Print an error."""
        label = "\x1b[31merror:\x1b[0m" if has_colours(self.err) else "error:"
        _write(self.err, f"{label} {sanitise(text)}")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text.encode(errors="backslashreplace").decode() + "\n")  # the name of a file may be no UTF-8
        stream.flush()
    except BrokenPipeError:
        # The pipe is closed: discard later output, including the interpreter's flush at exit.
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, stream.fileno())
        os.close(null_device)


def rlkit_version() -> str:
    """Return the installed version, or "unknown" in a checkout that is not installed."""
    from importlib import metadata

    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
