"""Seal verification, so that processes left by the agent cannot write a reward or the tests.

Invariant: a verifier starts only after its environment is sealed. If an environment cannot be sealed, the rollout fails
and gets no reward.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol, TypeGuard, runtime_checkable
from weakref import WeakKeyDictionary

from harbor.environments.base import BaseEnvironment
from harbor.models.task.config import TaskOS
from harbor.models.trial.paths import EnvironmentPaths
from pydantic import BaseModel, ConfigDict

from rlkit._util.sections import validate_fields
from rlkit._util.threads import in_thread
from rlkit.envs.harbor.verification.agent_records import records_by_environment
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.sandbox.spec import shared_paths

TABLE = "rlkit"
"""Table of a task's `[metadata]` with the part of the agent's work that is verified."""

PRIVATE_FOLDERS = tuple(
    str(path) for path in (EnvironmentPaths.verifier_dir, EnvironmentPaths.tests_dir, EnvironmentPaths.agent_dir)
)
"""Private folders of a verifier's view."""

_PROGRAM_FOLDERS = frozenset({"bin", "etc", "lib", "lib32", "lib64", "sbin", "usr"})
"""Folders at the root of an image with its programs, libraries and settings."""

_SEAL_S = 60

# Prints number:start-time of each process of a container, except the shell that lists them and its ancestors.
_LIST = """
list() {
  own=" $$ "; up=$$
  while [ "${up:-0}" -gt 1 ]; do
    line=$(cat "/proc/$up/stat" 2>/dev/null) || break
    set -- ${line##*)}; up=$2; own="$own$up "
  done
  for folder in /proc/[0-9]*; do
    number=${folder#/proc/}
    case "$own" in *" $number "*) [ "$number" = 1 ] || continue;; esac
    line=$(cat "$folder/stat" 2>/dev/null) || continue
    set -- ${line##*)}
    [ "$2" = "$$" ] || echo "$number:${20}"
  done
}
"""
# Stops all processes at once, except this shell and the first process, so that none can start another process. Then
# the kept processes and the shell's ancestors are continued, and all others are signalled.
_SIGNAL = """
kill -STOP -1
up=$$
while [ "${up:-0}" -gt 1 ]; do
  line=$(cat "/proc/$up/stat" 2>/dev/null) || break
  set -- ${line##*)}; up=$2
  kill -CONT "$up"
done
for process in $(list); do
  case " $kept " in
    *" $process "*) kill -CONT "${process%:*}" ;;
    *) kill -"$signal" "${process%:*}" ;;
  esac
done
exit 0
"""
_RENEW = """
for folder in $folders; do
  parent=${folder%/*}
  if [ -n "$parent" ] && { [ -L "$parent" ] || [ ! -d "$parent" ]; }; then rm -rf "$parent"; fi
  if [ -L "$folder" ] || [ ! -d "$folder" ]; then rm -rf "$folder"; fi
  mkdir -p "$folder" || exit 1
  rm -rf "$folder"/* "$folder"/.[!.]* "$folder"/..?* || exit 1
  chown 0:0 "$folder" && chmod 755 "$folder" || exit 1
done
"""


@dataclass(frozen=True)
class TestedWork:
    """Part of the agent's work that a task's tests examine: folders of the sandbox, None for all.

    Outside these folders the tests see the original image. `processes` also keeps processes left by the agent.
    """

    __test__ = False  # otherwise pytest collects it as a test class

    folders: tuple[str, ...] | None = None
    processes: bool = False

    @classmethod
    def of(cls, metadata: Mapping[str, object]) -> TestedWork:
        """Read the table `[metadata.rlkit]` of a task; raise a UsageError that names an invalid key."""
        place = f"task.toml: metadata.{TABLE}"
        table = validate_fields(_Table, metadata.get(TABLE, {}), place=place)
        if table.tested_folders is None:
            return cls(None, table.tested_processes)
        try:
            return cls(shared_paths(table.tested_folders, private=PRIVATE_FOLDERS), table.tested_processes)
        except UsageError as error:
            raise UsageError(f"{place}.tested_folders: {error}") from None


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tested_folders: list[str] | None = None
    tested_processes: bool = False


@runtime_checkable
class SealableEnvironment(Protocol):
    """An environment that can give the verifier a separate view."""

    seal_problem: str
    """Reason why it cannot, if known; empty if it can."""

    async def seal(self, work: TestedWork, user: str | int | None) -> None:
        """Redirect commands and transfers to a view that shows this work to a verifier."""
        ...

    async def unseal(self) -> None:
        """Redirect commands and transfers to the agent's side again."""
        ...


_own_processes = WeakKeyDictionary[BaseEnvironment, frozenset[str]]()


async def note_processes(environment: BaseEnvironment) -> None:
    """Record the processes of an environment before the agent starts."""
    if not _has_view(environment) and environment.os != TaskOS.WINDOWS:
        listed = await environment.exec(f"{_LIST}\nlist", user="root", timeout_sec=_SEAL_S)
        if listed.return_code == 0:
            _own_processes[environment] = frozenset((listed.stdout or "").split())


async def restore_logs(environment: BaseEnvironment, folder: Path) -> None:
    """Upload the agent's logs, in their state at the end of its work, to a sealed environment.

    They are in the trial's folder of logs, with the records that the agent's program wrote on this side.
    """
    if (records := records_by_environment.get(environment)) is not None:
        await in_thread(records.restore)
    if not environment.capabilities.mounted:
        await environment.upload_dir(folder, str(EnvironmentPaths.for_os(environment.os).agent_dir))


@asynccontextmanager
async def sealed(
    environment: BaseEnvironment, work: TestedWork, *, user: str | int | None, is_last: bool
) -> AsyncGenerator[None]:
    """Seal an environment from processes left by the agent, during verification.

    Args:
        user: user of the tests; None for the image's own.
        is_last: True if the agent's work is over. Without a view, its processes are then killed; otherwise they are
            stopped during verification.

    Raises:
        EnvironmentFault: the environment cannot be sealed.
    """
    if _has_view(environment):
        await environment.seal(work, user)
        try:
            yield
        finally:
            await environment.unseal()
        return
    if environment.os == TaskOS.WINDOWS:  # Harbor empties its folders
        yield
        return
    ends_processes = not work.processes
    if ends_processes:
        await _signal_processes(environment, "KILL" if is_last else "STOP")
    try:
        await _renew_folders(environment, user)
        yield
    finally:
        if ends_processes and not is_last:
            await _signal_processes(environment, "CONT")


def describe_seal(*, has_view: bool, work: TestedWork) -> tuple[str, ...]:
    """List the ways in which an agent can still forge results, one line each; empty if all is sealed."""
    loopholes: list[str] = []
    programs = [folder for folder in work.folders or () if PurePosixPath(folder).parts[1] in _PROGRAM_FOLDERS]
    if has_view and programs:
        loopholes.append(
            f"the tests run programs and settings from {', '.join(programs)}, which the agent can change: name only "
            "the folders of its own work in metadata.rlkit.tested_folders"
        )
    if not has_view or work.folders is None:
        fix = "list metadata.rlkit.tested_folders in task.toml" if has_view else "use a separate verifier environment"
        loopholes.append(f"the tests run programs and settings that the agent can change: {fix}")
    if not has_view and work.processes:
        loopholes.append(
            "processes that the agent leaves running can write rewards and tests, since tested_processes is set: "
            "use a separate verifier environment"
        )
    return tuple(loopholes)


def _has_view(environment: object) -> TypeGuard[SealableEnvironment]:
    return isinstance(environment, SealableEnvironment) and not environment.seal_problem


async def _signal_processes(environment: BaseEnvironment, signal: str) -> None:
    processes = _own_processes.get(environment)
    if processes is None:
        raise EnvironmentFault("the environment's own processes are unknown, so the agent's cannot be identified")
    await _run_as_root(environment, f"{_LIST}\nkept='{' '.join(sorted(processes))}'\nsignal={signal}\n{_SIGNAL}")


async def _renew_folders(environment: BaseEnvironment, user: str | int | None) -> None:
    paths = EnvironmentPaths.for_os(environment.os)
    renew = f"folders='{paths.tests_dir} {paths.verifier_dir}'\n{_RENEW}"
    if user not in (None, "root", 0, "0"):
        renew += f"chown {user} {paths.verifier_dir}\n"
    await _run_as_root(environment, renew)


async def _run_as_root(environment: BaseEnvironment, script: str) -> None:
    result = await environment.exec(script, user="root", timeout_sec=_SEAL_S)
    if result.return_code != 0:
        raise EnvironmentFault(f"the environment could not be sealed: {(result.stderr or result.stdout or '').strip()}")
