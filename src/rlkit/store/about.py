"""run.json: what a run is, and how it stands.

Invariant: a run goes on only as the run that it was begun as; no secret of its configuration is written down.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from rlkit import atomic
from rlkit.config import Resolved, show_lines
from rlkit.config.secrets import redact as redact_config
from rlkit.config.secrets import secrets_in
from rlkit.errors import UsageError
from rlkit.redaction import redact
from rlkit.store import codec, lines
from rlkit.store.history import DRAW_BYTES
from rlkit.store.journal import Kind, Record, records
from rlkit.types import Json

FORMAT_VERSION = 2
"""Of the run directory; a reader refuses one that is newer than it knows."""

type Status = Literal["running", "completed", "interrupted", "budget", "failed"]

_RETRY = "retry_failed_rollouts"

RECORDED_PACKAGES = ("rlkit", "tinker", "tinker-cookbook", "torch", "transformers", "numpy")


class About:
    """What is written down of a run as a whole.

    Args:
        directory: of the run. What is there of a run that finished nothing is removed.
        resolved: the configuration, written redacted with the origin of each value.
        resume: go on with the run that is there.

    Raises:
        UsageError: the directory holds a run and `resume` is not set, or another run than the configuration's.
    """

    def __init__(self, directory: Path, resolved: Resolved, *, resume: bool) -> None:
        self._directory = directory
        self._secrets = secrets_in(resolved.config.model_dump(mode="json"))
        held = any((directory / name).exists() for name in ("metrics.jsonl", "checkpoints.jsonl", "episodes"))
        held = (
            held or any(_finished(record) for record in records(directory / "journal")) or _of_other_format(directory)
        )
        if resume:
            about: dict[str, Json] = lines.read_object(directory / "run.json")
            if about.get("format") != FORMAT_VERSION:
                raise UsageError(
                    f"{directory} was written in format {about.get('format')}, and this rlkit knows {FORMAT_VERSION}: "
                    "resume it with the rlkit that wrote it"
                )
            begun = about.get("identity")
            for field, value in _identity(resolved).items():
                before = begun.get(field) if isinstance(begun, Mapping) else None
                if value != before:
                    raise UsageError(f"{field}: {directory} was begun with {before}; it cannot go on with {value}")
            for name in ("metrics.jsonl", "checkpoints.jsonl"):
                lines.mend(directory / name)
            for half in directory.rglob(".*.tmp"):  # nobody else is writing
                half.unlink(missing_ok=True)
        elif held:
            raise UsageError(f"{directory} already holds a run: resume it (--resume), or choose another name (--name)")
        else:
            _clear(directory)
            about = {
                "format": FORMAT_VERSION,
                "name": directory.name,
                "seed": resolved.config.seed,
                "identity": _identity(resolved),
                "started": time.time(),
            }
        about["versions"] = {"python": platform.python_version(), **_versions()}
        about.pop("error", None)
        atomic.write_text(directory / "config.yaml", "\n".join(show_lines(resolved)) + "\n")
        self._content = about
        self.set_status("running")

    def set_status(self, status: Status, *, error: str = "") -> None:
        """Say how the run stands, for people and for other programs; secrets are taken out of the error."""
        changed: dict[str, Json] = {"status": status, "updated": time.time()}
        if error:
            changed["error"] = self.redacted(error)
        self._content.update(changed)
        self.write()

    def redacted(self, text: str) -> str:
        """`text` without the secrets of the configuration and of the environment."""
        return redact(redact_config(text, hidden=self._secrets))

    def set_failed(self, error: Exception, *, retry: bool) -> None:
        """Say that the run came to a bad end.

        Args:
            error: says why.
            retry: rollouts that failed were the reason, and are to be played again when the run goes on.
        """
        self.retries_failed = self.retries_failed or retry
        self.set_status("failed", error=f"{type(error).__name__}: {error}")

    @property
    def retries_failed(self) -> bool:
        """Whether rollouts that failed are played again, as if for the first time; until another step is done."""
        return self._content.get(_RETRY) is True

    @retries_failed.setter
    def retries_failed(self, retried: bool) -> None:
        self._content[_RETRY] = retried

    def write(self) -> None:
        """Write down what is known."""
        atomic.write_text(self._directory / "run.json", json.dumps(self._content, indent=2) + "\n")


@cache
def _versions() -> Mapping[str, str]:
    return {name: version(name) for name in RECORDED_PACKAGES}


def _identity(resolved: Resolved) -> dict[str, Json]:
    """What makes a run the run that it is, and stays when it goes on."""
    config = resolved.config
    return {
        "model": config.model,
        "lora": config.lora.model_dump(),
        "seed": config.seed,
        "envs": sorted(config.envs),
        "load_checkpoint": config.load_checkpoint,
    }


def _finished(record: Record) -> bool:
    """Whether it is an episode that did not fail."""
    return record.kind is Kind.EPISODE and codec.decode(record.content[DRAW_BYTES:]).status != "failed"


def _of_other_format(directory: Path) -> bool:
    """Whether what it holds cannot be read here."""
    try:
        return lines.read_object(directory / "run.json").get("format") != FORMAT_VERSION
    except (OSError, UsageError):  # there is none, or it was never finished
        return False


def _clear(directory: Path) -> None:
    """Remove what a run left that finished nothing."""
    for folder, pattern in (("journal", "*.log"), ("state", "*.json")):
        for path in (directory / folder).glob(pattern):
            path.unlink()
    (directory / "usage.json").unlink(missing_ok=True)
