"""run.json: what a run is, and how it stands.

Invariant: a run goes on only as the run that it was begun as; no secret of its configuration is written down.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from rlkit._util import files
from rlkit._util.frames import error_place
from rlkit._util.json_values import safe_str
from rlkit._util.paths import runs_dir
from rlkit._util.redaction import make_redactor
from rlkit.config import Config, Resolved, load_config, show_lines
from rlkit.config.loading.secrets import redact as redact_config
from rlkit.config.loading.secrets import secrets_in
from rlkit.errors import UsageError
from rlkit.store import codec, jsonl
from rlkit.store.history import DRAW_BYTES, list_state_steps
from rlkit.store.journal import RecordKind, read_records
from rlkit.types import Json

FORMAT_VERSION = 2
"""Of the run directory; a reader refuses one that is newer than it knows."""

type Status = Literal["running", "completed", "interrupted", "budget", "failed"]

_OF_ENDING = ("error", "reason", "place", "place_is_own")

_STATE = "has_state"
_RETRY = "retry_failed_rollouts"

CONFIG_END = "# end of the configuration"
"""The last line of config.yaml: one that was cut off between two lines is a configuration, too, and another one."""

RECORDED_PACKAGES = ("rlkit", "tinker", "tinker-cookbook", "torch", "transformers", "numpy")


class RunMetadata:
    """What is written down of a run as a whole; its arguments and errors are those of `RunStore`."""

    def __init__(self, directory: Path, resolved: Resolved, *, resume: bool) -> None:
        self._directory = directory
        self._secrets = secrets_in(resolved.config.model_dump(mode="json"))
        self._config = "\n".join([*show_lines(resolved), CONFIG_END]) + "\n"
        self._begun = False
        if resume:
            self._content = _of_same_run(directory, resolved)
            return
        if _holds_results(directory):
            if not (directory / "run.json").exists():
                raise UsageError(
                    f"{directory} holds a run whose run.json is gone: put it back from a copy, or choose another name "
                    "(--name)"
                )
            raise UsageError(f"{directory} already holds a run: resume it (--resume), or choose another name (--name)")
        _clear(directory)
        self._content: dict[str, Json] = {
            "format": FORMAT_VERSION,
            "name": directory.name,
            "seed": resolved.config.seed,
            "identity": _identity(resolved),
            "started": time.time(),
        }
        self.begin()

    def begin(self) -> None:
        """Write down that the run runs, and with which configuration; drop what an earlier process left half written.

        A new run begins at once, one that is resumed once it is known that it can go on.
        """
        self._begun = True
        for name in ("metrics.jsonl", "checkpoints.jsonl"):
            jsonl.repair(self._directory / name)
        for half in self._directory.rglob(".*.tmp"):  # nobody else is writing
            half.unlink(missing_ok=True)
        self._content["versions"] = {"python": platform.python_version(), **_versions()}
        self._content["config_end"] = CONFIG_END
        for field in _OF_ENDING:
            self._content.pop(field, None)
        files.write_text(self._directory / "config.yaml", self._config)
        self.set_status("running")

    def set_status(self, status: Status, *, error: str = "", reason: str = "") -> None:
        """Record how the run stands, without secrets.

        Args:
            status: new status.
            error: type and message of the error of a failed run.
            reason: why a run ended before its time without an error.
        """
        changed: dict[str, Json] = {"status": status, "updated": time.time()}
        if error:
            changed["error"] = self.redact(error)
        if reason:
            changed["reason"] = reason
        self._content.update(changed)
        self.write()

    def redact(self, text: str) -> str:
        """Return a text without the secrets of the configuration and of the environment."""
        return self.make_redactor()(text)

    def make_redactor(self) -> Callable[[str], str]:
        """Return `redacted` for many texts."""
        redact_environment = make_redactor()
        return lambda text: redact_environment(redact_config(text, hidden=self._secrets))

    def set_failed(self, error: Exception, *, retry: bool) -> None:
        """Record that the run failed; `retry` plays rollouts that failed again when the run goes on."""
        self.retry_failed = self.retry_failed or retry
        place = error_place(error)
        if place is not None:
            self._content |= {"place": self.redact(str(place)), "place_is_own": place.is_user_code}
        self.set_status("failed", error=f"{type(error).__name__}: {safe_str(error)}")

    def record_findings(self, findings: Sequence[Mapping[str, Json]]) -> None:
        """Record findings that cannot be read off the metrics later."""
        self._content["findings"] = [dict(finding) for finding in findings]
        self.write()

    @property
    def has_state(self) -> bool:
        """True if a state of the task sources was written: the run cannot go on without one."""
        return self._content.get(_STATE) is True

    @has_state.setter
    def has_state(self, written: bool) -> None:
        self._content[_STATE] = written

    @property
    def retry_failed(self) -> bool:
        """Whether rollouts that failed are played again, as if for the first time; until another step is done."""
        return self._content.get(_RETRY) is True

    @retry_failed.setter
    def retry_failed(self, retried: bool) -> None:
        self._content[_RETRY] = retried

    def write(self) -> None:
        """Write down what is known; nothing of a run that is resumed and has not begun."""
        if not self._begun:
            return
        files.write_text(self._directory / "run.json", json.dumps(self._content, indent=2) + "\n")


@cache
def _versions() -> Mapping[str, str]:
    return {name: version(name) for name in RECORDED_PACKAGES}


def _identity(resolved: Resolved) -> dict[str, Json]:
    """Return what stays the same when a run goes on."""
    config = resolved.config
    return {
        "model": config.model,
        "lora": config.lora.model_dump(),
        "seed": config.seed,
        "envs": sorted(config.envs),
        "load_checkpoint": config.load_checkpoint,
    }


def is_run_directory(directory: Path) -> bool:
    """Say whether there is a run in a directory."""
    return (directory / "run.json").exists()


def find_run(run: str | Path) -> Path:
    """Return the folder of a run, given its name or the folder itself.

    Raises:
        UsageError: there is no such run.
    """
    places = [runs_dir() / run, Path(run).absolute()]
    for place in places:
        if is_run_directory(place):
            return place
    for place in places:
        if (place / "journal").is_dir():
            raise UsageError(f"{place} is the folder of a run, and its run.json is gone: put it back from a copy")
    raise UsageError(f"there is no run {str(run)!r} in {runs_dir()}, nor is it the folder of one")


def load_run_config(directory: Path) -> Config:
    """Return the configuration that a run has recorded, also where the file is cut off.

    Raises:
        UsageError: it cannot be read.
    """
    return load_config([directory / "config.yaml"]).config


def find_run_config(directory: Path) -> Path:
    """Return the file of the configuration that a run has recorded.

    Raises:
        UsageError: it is gone, or cut off.
    """
    path = directory / "config.yaml"
    remedy = "go on with the file that the run was begun with: rlkit train FILE --name NAME --resume"
    if not path.is_file():
        raise UsageError(f"{path} is gone; {remedy}")
    end = jsonl.read_object(directory / "run.json").get("config_end")
    if isinstance(end, str) and end not in path.read_text(errors="replace").splitlines():
        raise UsageError(f"{path} is damaged: its last line, {end!r}, is not there; {remedy}")
    return path


def _of_same_run(directory: Path, resolved: Resolved) -> dict[str, Json]:
    """Return the run.json of the run that is to go on; a UsageError says that it is of another run, or damaged."""
    about: dict[str, Json] = jsonl.read_object(directory / "run.json")
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
    return about


def _holds_results(directory: Path) -> bool:
    """Say whether a folder holds something that a run has finished, or a run of another format."""
    if any((directory / name).exists() for name in ("metrics.jsonl", "checkpoints.jsonl", "episodes")):
        return True
    if any(step > 0 for step in list_state_steps(directory)):
        return True
    episodes = (record.content for record in read_records(directory / "journal") if record.kind is RecordKind.EPISODE)
    if any(codec.decode(content[DRAW_BYTES:]).status != "failed" for content in episodes):
        return True
    try:
        return jsonl.read_object(directory / "run.json").get("format") != FORMAT_VERSION
    except (OSError, UsageError):  # there is none, or it was never finished
        return False


def _clear(directory: Path) -> None:
    """Remove what a run left that finished nothing."""
    for folder, pattern in (("journal", "*.log"), ("state", "*.json")):
        for path in (directory / folder).glob(pattern):
            path.unlink()
    (directory / "usage.json").unlink(missing_ok=True)
