"""Conversion of terminal-bench 1 tasks (`task.yaml`) to Harbor tasks (`task.toml`), with Harbor's mapper.

Invariant: a converted task is solved exactly if terminal-bench 1 reports it as resolved; all other differences are
listed.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml
from pydantic import ValidationError
from yaml.error import MarkedYAMLError

from rlkit._util import files
from rlkit._util.paths import expand_user
from rlkit.envs.harbor.tasks import OLD_TASK_FILE, find_task_fault
from rlkit.envs.harbor.terminal_bench.build_contexts import find_context_fault
from rlkit.envs.harbor.terminal_bench.differences import PYTEST, get_parser_name, list_differences
from rlkit.errors import MissingError, UsageError
from rlkit.types import Json

# terminal-bench 1 reads the lines below pytest's first summary, and ignores the exit code. The output goes to a file,
# because a program that the tests leave running would keep a pipe open.
_TEST = """#!/bin/bash
export TEST_DIR=/tests
mkdir -p /logs/verifier
output=/logs/verifier/.run-tests.txt
bash /tests/run-tests.sh >"$output" 2>&1 </dev/null
code=$?
cat "$output"
"""
_BY_SUMMARY = r"""
export LC_ALL=C
shopt -s extglob
reward=0 failures=0 summary=
while IFS= read -r line || [ -n "$line" ]; do
  if [ -z "$summary" ]; then
    [[ "${line,,}" =~ =[[:space:]]*short\ test\ summary\ info[[:space:]]*= ]] && summary=1
    continue
  fi
  read -r status name <<<"${line//$'\e['*([0-9;])m/}"
  [ -n "$name" ] || continue
  case "${status%:}" in
    PASSED | XFAIL | SKIPPED) reward=1 ;;
    FAILED | ERROR | XPASS) failures=1 ;;
  esac
done <"$output"
[ "$failures" = 0 ] || reward=0
"""
_BY_EXIT_CODE = """
reward=0
[ "$code" != 0 ] || reward=1
"""
_VERDICT = """rm -f "$output"
echo "$reward" >/logs/verifier/reward.txt
exit "$code"
"""
# In terminal-bench 1, tests ran in the agent's container, and no task declared whether its tests inspect processes.
_METADATA = """
[metadata.rlkit]
tested_processes = true
"""


@dataclass(frozen=True)
class Conversion:
    """New folders of a conversion; by task name, reasons of failures and differences from terminal-bench 1."""

    folders: Sequence[Path]
    failed: Mapping[str, str]
    differences: Mapping[str, Sequence[str]]


def convert(source: Path, target: Path) -> Conversion:
    """Convert a task, or a folder of tasks, to new folders in `target`.

    Raises:
        UsageError: `source` has no terminal-bench 1 task, or `target` is inside `source` or is not writable.
        MissingError: the disk is full.
    """
    source, target = expand_user(source).absolute(), expand_user(target).absolute()
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder")
    if target.is_relative_to(source):
        raise UsageError(f"--to: {target} is inside {source}; choose another folder")
    tasks = [source] if (source / OLD_TASK_FILE).is_file() else sorted(list_old_tasks(source))
    if not tasks:
        raise UsageError(f"neither {source} nor a folder in it has a {OLD_TASK_FILE} of terminal-bench 1")
    _make_writable(target)
    folders, failed, differences = list[Path](), dict[str, str](), dict[str, Sequence[str]]()
    for task in tasks:
        try:
            lines = _convert_task(task, target / task.name)
        except ValueError as error:
            failed[task.name] = str(error)
            continue
        folders.append(target / task.name)
        if lines:
            differences[task.name] = lines
    return Conversion(folders, failed, differences)


def list_old_tasks(folder: Path) -> list[Path]:
    """Return the folders of the terminal-bench 1 tasks in a folder."""
    return [path.parent for path in folder.glob(f"*/{OLD_TASK_FILE}")]


def _make_writable(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"--to: {target} is or lies in a file; choose another folder") from None
    except OSError as error:
        raise UsageError(f"--to: {target} cannot be written: {error.strerror}; choose another folder") from None
    if not os.access(target, os.W_OK | os.X_OK):
        raise UsageError(f"--to: {target} cannot be written: no permission; choose another folder")


def _convert_task(source: Path, target: Path) -> list[str]:
    """Convert a task, and list the differences; raise a one-line ValueError if it cannot be converted."""
    from harbor.mappers.terminal_bench import TerminalBenchMapper

    if target.exists():
        raise ValueError(f"{target} already exists: remove it, or choose another folder")
    settings, compose = _read_files(source)
    if (fault := find_context_fault(source, compose)) is not None:  # the mapper copies contexts from anywhere
        raise ValueError(fault)
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        staged = Path(temporary) / source.name
        try:
            shutil.copytree(source, staged)
        except OSError as error:  # such as a broken link
            _require_room(str(error))
            raise ValueError(f"its files cannot be read: {' '.join(str(error).split())}") from None
        (staged / "solution.yaml").unlink(missing_ok=True)  # the mapper rejects tasks with this file
        mapping = TerminalBenchMapper().map(staged.parent, target.parent)
    reason = " ".join(mapping.failed[0][1].split()) if mapping.failed else _finish(source, target, settings)
    if reason is not None:  # an incomplete folder would block a retry
        shutil.rmtree(target, ignore_errors=True)
        _require_room(reason)
        raise ValueError(reason)
    return list_differences(source, settings, compose)


def _require_room(reason: str) -> None:
    """Raise MissingError if an error message says that the disk is full; Harbor's mapper gives no error number."""
    if any(os.strerror(number) in reason for number in files.FULL):
        raise MissingError("the disk is full, so the tasks cannot be converted: free some space, then retry")


def _read_files(source: Path) -> tuple[Mapping[str, Json], Mapping[str, Json]]:
    """Return the contents of `task.yaml` and `docker-compose.yaml`; messages of the mapper name temporary files."""
    from harbor.mappers.terminal_bench import TerminalBenchTaskConfig

    if not (source / "run-tests.sh").is_file():
        raise ValueError("it has no run-tests.sh")
    settings, compose = _read_yaml(source / OLD_TASK_FILE), _read_yaml(source / "docker-compose.yaml")
    try:
        TerminalBenchTaskConfig.model_validate(settings)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ValueError(f"{OLD_TASK_FILE}: {'; '.join(faults)}") from None
    services = compose.get("services") or {}
    if not isinstance(services, Mapping) or not all(isinstance(service, Mapping) for service in services.values()):
        raise ValueError("docker-compose.yaml: services: must be a mapping from names to their settings")
    return settings, compose


def _read_yaml(path: Path) -> Mapping[str, Json]:
    """Read a YAML mapping; raise a one-line ValueError with the file's name."""
    try:
        content = cast("object", yaml.safe_load(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is not UTF-8 text") from None
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path.name}{line}: is not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path.name}: must be a mapping of settings, not {type(content).__name__}")
    return cast("Mapping[str, Json]", content)


def _finish(source: Path, target: Path, settings: Mapping[str, Json]) -> str | None:
    """Complete a mapped task; return the reason if it cannot be played."""
    if not (target / "environment" / "Dockerfile").is_file():
        return "it has no Dockerfile in the build context of its docker-compose.yaml"
    if (source / "tests" / "test.sh").exists():
        return "its tests have a test.sh, but Harbor needs this name"
    shutil.copyfile(source / "run-tests.sh", target / "tests" / "run-tests.sh")
    rule = _BY_SUMMARY if get_parser_name(settings) == PYTEST else _BY_EXIT_CODE
    (target / "tests" / "test.sh").write_text(_TEST + rule + _VERDICT, encoding="utf-8")
    with (target / "task.toml").open("a", encoding="utf-8") as file:
        file.write(_METADATA)
    return find_task_fault(target)
