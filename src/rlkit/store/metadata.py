"""run.json and config.yaml: the identity of a run, its configuration and its status.

Invariant: a run is resumed only as the run that was started; no secret of its configuration is written.
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
from rlkit.config import Config, ResolvedConfig, load_config, show_lines
from rlkit.config.loading.secrets import redact as redact_config
from rlkit.config.loading.secrets import secrets_in
from rlkit.errors import UsageError
from rlkit.store import codec, jsonl
from rlkit.store.history import DRAW_BYTES, list_state_steps
from rlkit.store.journal import RecordKind, read_records
from rlkit.types import Json

FORMAT_VERSION = 2
"""Version of the run directory's format; a reader refuses any other."""

type Status = Literal["running", "completed", "interrupted", "budget", "failed"]

_ENDING_FIELDS = ("error", "reason", "place", "place_is_own")

_STATE = "has_state"
_RETRY = "retry_failed_rollouts"

CONFIG_END = "# end of the configuration"
"""The last line of config.yaml, since a file cut off between two lines is another valid configuration."""

RECORDED_PACKAGES = ("rlkit", "tinker", "tinker-cookbook", "torch", "transformers", "numpy")


class RunMetadata:
    """The recorded facts about a run as a whole; its arguments and errors are those of `RunStore`."""

    def __init__(self, directory: Path, resolved: ResolvedConfig, *, resume: bool) -> None:
        self._directory = directory
        self._secrets = secrets_in(resolved.config.model_dump(mode="json"))
        self._config = "\n".join([*show_lines(resolved), CONFIG_END]) + "\n"
        self._may_write = False
        if resume:
            self._content = _load_same_run(directory, resolved)
            return
        if _holds_results(directory):
            if is_run_directory(directory):
                problem = "already holds a run: resume it (--resume)"
            else:
                problem = "holds a run whose run.json is gone: put it back from a copy"
            raise UsageError(f"{directory} {problem}, or choose another name (--name)")
        _clear(directory)
        self._content: dict[str, Json] = {
            "format": FORMAT_VERSION,
            "name": directory.name,
            "seed": resolved.config.seed,
            "identity": _identity(resolved),
            "started": time.time(),
        }
        self.mark_running()

    def mark_running(self, *, has_state: bool = False) -> None:
        """Record that the run is running and its configuration; drop what an earlier process left half written.

        A new run is marked at once, a resumed one when it is certain that it can be resumed.

        Args:
            has_state: a state of the task sources is on the disk.
        """
        self._may_write = True
        for name in ("metrics.jsonl", "checkpoints.jsonl"):
            jsonl.repair(self._directory / name)
        for path in self._directory.rglob(".*.tmp"):  # no other process is writing
            path.unlink(missing_ok=True)
        self._content["versions"] = {"python": platform.python_version(), **_read_versions()}
        self._content["config_end"] = CONFIG_END
        if has_state:
            self._content[_STATE] = True
        for field in _ENDING_FIELDS:
            self._content.pop(field, None)
        files.write_text(self._directory / "config.yaml", self._config)
        self.set_status("running")

    def set_status(self, status: Status, *, error: str = "", reason: str = "") -> None:
        """Record the status of the run, without secrets.

        Args:
            status: new status.
            error: type and message of the error of a failed run.
            reason: reason of an early end without an error.
        """
        self._content |= {"status": status, "updated": time.time()}
        if error:
            self._content["error"] = self.redact(error)
        if reason:
            self._content["reason"] = reason
        self.write()

    def redact(self, text: str) -> str:
        """Return a text without the secrets of the configuration and of the environment."""
        return self.make_redactor()(text)

    def make_redactor(self) -> Callable[[str], str]:
        """Return `redact` for many texts."""
        redact_environment = make_redactor()
        return lambda text: redact_environment(redact_config(text, hidden=self._secrets))

    def set_failed(self, error: Exception, *, retry: bool) -> None:
        """Record that the run failed; with `retry`, the resumed run plays failed rollouts again."""
        self.retry_failed = self.retry_failed or retry
        place = error_place(error)
        if place is not None:
            self._content |= {"place": self.redact(str(place)), "place_is_own": place.is_user_code}
        self.set_status("failed", error=f"{type(error).__name__}: {safe_str(error)}")

    def record_findings(self, findings: Sequence[Mapping[str, Json]]) -> None:
        """Record findings that the metrics do not show."""
        self._content["findings"] = [dict(finding) for finding in findings]
        self.write()

    @property
    def has_state(self) -> bool:
        """True if a state of the task sources was written; the run cannot be resumed without one."""
        return self._content.get(_STATE) is True

    @property
    def retry_failed(self) -> bool:
        """True if failed rollouts are played again, as if for the first time, until the next step is done."""
        return self._content.get(_RETRY) is True

    @retry_failed.setter
    def retry_failed(self, retry: bool) -> None:
        self._content[_RETRY] = retry

    def write(self) -> None:
        """Write run.json, unless it is not yet certain that the run can be resumed."""
        if self._may_write:
            files.write_text(self._directory / "run.json", json.dumps(self._content, indent=2) + "\n")


@cache
def _read_versions() -> Mapping[str, str]:
    """Return the version of each recorded package; slow, because it parses whole package descriptions."""
    return {name: version(name) for name in RECORDED_PACKAGES}


def _identity(resolved: ResolvedConfig) -> dict[str, Json]:
    """Return the settings that a resumed run must not change."""
    config = resolved.config
    return {
        "model": config.model,
        "lora": config.lora.model_dump(),
        "seed": config.seed,
        "envs": sorted(config.envs),
        "load_checkpoint": config.load_checkpoint,
    }


def is_run_directory(directory: Path) -> bool:
    """Return whether a directory holds a run."""
    return (directory / "run.json").exists()


def find_run(run: str | Path) -> Path:
    """Return the directory of a run, given its name or the directory itself.

    Raises:
        UsageError: there is no such run.
    """
    directories = [runs_dir() / run, Path(run).absolute()]
    for directory in directories:
        if is_run_directory(directory):
            return directory
    for directory in directories:
        if (directory / "journal").is_dir():
            raise UsageError(f"{directory} is the folder of a run, and its run.json is gone: put it back from a copy")
    raise UsageError(f"there is no run {str(run)!r} in {runs_dir()}, nor is it the folder of one")


def load_run_config(directory: Path) -> Config:
    """Return the recorded configuration of a run, even if the file is cut off.

    Raises:
        UsageError: it cannot be read.
    """
    return load_config([directory / "config.yaml"]).config


def find_run_config(directory: Path) -> Path:
    """Return the path of the recorded configuration of a run.

    Raises:
        UsageError: it is gone, or cut off.
    """
    path = directory / "config.yaml"
    remedy = "resume with the file that the run was started with: rlkit train FILE --name NAME --resume"
    if not path.is_file():
        raise UsageError(f"{path} is gone; {remedy}")
    end = jsonl.read_object(directory / "run.json").get("config_end")
    if isinstance(end, str) and end not in path.read_text(errors="replace").splitlines():
        raise UsageError(f"{path} is damaged: its last line, {end!r}, is not there; {remedy}")
    return path


def _load_same_run(directory: Path, resolved: ResolvedConfig) -> dict[str, Json]:
    """Return the run.json of the run to resume; raise `UsageError` if it is of another run, or damaged."""
    content: dict[str, Json] = jsonl.read_object(directory / "run.json")
    if content.get("format") != FORMAT_VERSION:
        raise UsageError(
            f"{directory} was written in format {content.get('format')}, and this rlkit knows {FORMAT_VERSION}: "
            "resume it with the rlkit that wrote it"
        )
    identity = content.get("identity")
    for field, value in _identity(resolved).items():
        recorded = identity.get(field) if isinstance(identity, Mapping) else None
        if value != recorded:
            raise UsageError(f"{field}: {directory} was started with {recorded}; it cannot be resumed with {value}")
    return content


def _holds_results(directory: Path) -> bool:
    """Return whether a folder holds something that a run has finished, or a run of another format."""
    if any((directory / name).exists() for name in ("metrics.jsonl", "checkpoints.jsonl", "episodes")):
        return True
    if any(step > 0 for step in list_state_steps(directory)):
        return True
    episodes = (record.content for record in read_records(directory / "journal") if record.kind is RecordKind.EPISODE)
    if any(codec.decode(content[DRAW_BYTES:]).status != "failed" for content in episodes):
        return True
    try:
        return jsonl.read_object(directory / "run.json").get("format") != FORMAT_VERSION
    except (OSError, UsageError):  # missing, or never completely written
        return False


def _clear(directory: Path) -> None:
    """Remove the files of a run without results."""
    for folder, pattern in (("journal", "*.log"), ("state", "*.json")):
        for path in (directory / folder).glob(pattern):
            path.unlink()
    (directory / "usage.json").unlink(missing_ok=True)
