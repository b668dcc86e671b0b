"""run.json and config.yaml: the identity of a run, its configuration and its status.

Invariant: a resumed run has the identity of the run that was started. No secret of the configuration is written,
and none in the text that an environment adds to an episode.
"""

from __future__ import annotations

import asyncio
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from rlkit._util import files
from rlkit._util.files import json_lines
from rlkit._util.frames import error_place
from rlkit._util.json_values import redact_object, safe_str
from rlkit._util.redaction import make_redactor
from rlkit.config.loading.resolved import ResolvedConfig, show_lines
from rlkit.config.loading.run_config import is_run_directory
from rlkit.config.loading.secrets import redact as redact_config
from rlkit.config.loading.secrets import secrets_in
from rlkit.errors import DISTRIBUTION, RolloutsFailed, UsageError
from rlkit.store import codec
from rlkit.store.history import DRAW_BYTES, list_state_steps
from rlkit.store.journal import RecordKind, read_records
from rlkit.types import Episode, Json

FORMAT_VERSION = 2  # version of the run directory's format; other versions are rejected

type Status = Literal["running", "completed", "interrupted", "budget", "failed"]

_ENDING_FIELDS = ("error", "reason", "place", "place_is_own")

_STATE = "has_state"
_RETRY = "retry_failed_rollouts"

CONFIG_END = "# end of the configuration"
"""Last line of config.yaml: a file that was cut off between two lines would be another valid configuration."""

RECORDED_PACKAGES = (DISTRIBUTION, "tinker", "tinker-cookbook", "torch", "transformers", "numpy")


class RunMetadata:
    """Writer of run.json and config.yaml; arguments and errors as in `RunStore`."""

    def __init__(self, directory: Path, resolved: ResolvedConfig, *, resume: bool) -> None:
        self._directory = directory
        self._secrets = secrets_in(resolved.config.model_dump(mode="json"))
        self._config = "\n".join([*show_lines(resolved), CONFIG_END]) + "\n"
        self._may_write = self._has_error = False
        if resume:
            self._content = _load_same_run(directory, resolved)
            return
        if _holds_results(directory):
            problem = "holds a run whose run.json is missing: put it back from a copy"
            if is_run_directory(directory):
                problem = "already holds a run: resume it (--resume)"
            raise UsageError(f"{directory} {problem}, or choose another `name` (--name)")
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
        """Record the status `running` and the configuration, and remove incomplete writes of an earlier process.

        A new run is marked at once, a resumed run when it is certain that it can be resumed.

        Args:
            has_state: a state of the task sources is on the disk.
        """
        if not self._may_write:
            self._may_write = True
            for name in ("metrics.jsonl", "checkpoints.jsonl"):
                json_lines.repair(self._directory / name)
            for path in self._directory.rglob(".*.tmp"):  # no other process is writing
                path.unlink(missing_ok=True)
            self._content["versions"] = {"python": platform.python_version(), **_read_versions()}
            self._content["config_end"] = CONFIG_END
            self._content = {name: value for name, value in self._content.items() if name not in _ENDING_FIELDS}
            files.write_text(self._directory / "config.yaml", self._config)
        if has_state:
            self._content[_STATE] = True
        self.set_status("running")

    def set_status(self, status: Status, *, error: str = "", reason: str = "") -> None:
        """Record the status of the run; `reason` explains an early end without an error."""
        self._content |= {"status": status, "updated": time.time()}
        if error:
            self._content["error"] = self.redact(error)
        if reason:
            self._content["reason"] = reason
        self.write()

    def redact(self, text: str) -> str:
        """Return a text without the secrets of the configuration and of the environment variables."""
        return self.make_redactor()(text)

    def make_redactor(self) -> Callable[[str], str]:
        """Return a function that redacts like `redact` but reads the environment variables only once."""
        redact_environment = make_redactor()
        return lambda text: redact_environment(redact_config(text, hidden=self._secrets))

    def redact_episode(self, episode: Episode) -> Episode:
        """Return an episode without secrets in its error and its info; its tokens are unchanged."""
        if episode.error is None and not episode.info:
            return episode
        redact = self.make_redactor()  # reads all secrets, which takes longer than most rollouts
        error = None if episode.error is None else redact(episode.error)
        info = redact_object(episode.info, redact)
        is_unchanged = info is episode.info and error == episode.error
        return episode if is_unchanged else replace(episode, error=error, info=info)

    def record_error(self, error: Exception | asyncio.CancelledError) -> None:
        """Record the first exception that ended the run; a full disk must not hide it."""
        if self._has_error:
            return
        self._has_error = True
        with suppress(OSError):
            if isinstance(error, asyncio.CancelledError):
                self.set_status("interrupted")
                return
            self.retry_failed = self.retry_failed or isinstance(error, RolloutsFailed)
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
        """True if a state of the task sources was written; a run cannot be resumed without it."""
        return self._content.get(_STATE) is True

    @property
    def retry_failed(self) -> bool:
        """True if failed rollouts are repeated with all their retries, until the next step is complete."""
        return self._content.get(_RETRY) is True

    @retry_failed.setter
    def retry_failed(self, retry: bool) -> None:
        self._content[_RETRY] = retry

    def write(self) -> None:
        """Write run.json, if it is certain that the run can be resumed."""
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


def _load_same_run(directory: Path, resolved: ResolvedConfig) -> dict[str, Json]:
    """Return the run.json of the run to resume; raise `UsageError` if it is damaged or belongs to another run."""
    content: dict[str, Json] = json_lines.read_object(directory / "run.json")
    if content.get("format") != FORMAT_VERSION:
        raise UsageError(
            f"{directory} was written in format {content.get('format')}, but this rlkit reads format {FORMAT_VERSION}: "
            "resume it with the rlkit that wrote it"
        )
    identity = content.get("identity")
    for field, value in _identity(resolved).items():
        recorded = identity.get(field) if isinstance(identity, Mapping) else None
        if value != recorded:
            raise UsageError(f"{field}: {directory} was started with {recorded}; it cannot be resumed with {value}")
    return content


def _holds_results(directory: Path) -> bool:
    """Return whether a folder holds finished work of a run, or a run of another format."""
    if any((directory / name).exists() for name in ("metrics.jsonl", "checkpoints.jsonl", "episodes")):
        return True
    if any(step > 0 for step in list_state_steps(directory)):
        return True
    episodes = (record.content for record in read_records(directory / "journal") if record.kind is RecordKind.EPISODE)
    if any(codec.decode(content[DRAW_BYTES:]).status != "failed" for content in episodes):
        return True
    with suppress(OSError, UsageError):  # missing, or never completely written
        return json_lines.read_object(directory / "run.json").get("format") != FORMAT_VERSION
    return False


def _clear(directory: Path) -> None:
    """Remove the files of a run without results."""
    for folder, pattern in (("journal", "*.log"), ("state", "*.json")):
        for path in (directory / folder).glob(pattern):
            path.unlink()
    (directory / "usage.json").unlink(missing_ok=True)
