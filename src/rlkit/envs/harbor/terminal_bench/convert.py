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
from rlkit.envs.harbor.tasks import OLD_TASK_FILE, find_task_fault
from rlkit.envs.harbor.terminal_bench.build_contexts import find_context_fault
from rlkit.envs.harbor.terminal_bench.differences import PYTEST, list_differences, read_parser_name
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
    source, target = source.expanduser().absolute(), target.expanduser().absolute()
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
        if (reason := _convert_task(task, target)) is not None:
            failed[task.name] = reason
            continue
        folders.append(target / task.name)
        if lines := list_differences(task):
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


def _convert_task(source: Path, target: Path) -> str | None:
    """Convert a task; return a one-line reason if it cannot be converted."""
    from harbor.mappers.terminal_bench import TerminalBenchMapper

    target_folder = target / source.name
    if target_folder.exists():
        return f"{target_folder} already exists: remove it, or choose another folder"
    reason = _find_file_fault(source) or find_context_fault(source)  # the mapper copies contexts from anywhere
    if reason is not None:
        return reason
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        staged = Path(temporary) / source.name
        try:
            shutil.copytree(source, staged)
        except OSError as error:  # such as a broken link
            _require_room(str(error))
            return f"its files cannot be read: {' '.join(str(error).split())}"
        (staged / "solution.yaml").unlink(missing_ok=True)  # the mapper rejects tasks with this file
        mapping = TerminalBenchMapper().map(staged.parent, target)
    reason = " ".join(mapping.failed[0][1].split()) if mapping.failed else _finish(source, target_folder)
    if reason is not None:  # an incomplete folder would block a retry
        shutil.rmtree(target_folder, ignore_errors=True)
        _require_room(reason)
    return reason


def _require_room(reason: str) -> None:
    """Raise MissingError if an error message says that the disk is full; Harbor's mapper gives no error number."""
    if any(os.strerror(number) in reason for number in files.FULL):
        raise MissingError("the disk is full, so the tasks cannot be converted: free some space, then retry")


def _find_file_fault(source: Path) -> str | None:
    """Return the fault in a task's required files, or None; messages of the mapper name temporary files."""
    from harbor.mappers.terminal_bench import TerminalBenchTaskConfig

    if not (source / "run-tests.sh").is_file():
        return "it has no run-tests.sh"
    try:
        settings, compose = _read_yaml(source / OLD_TASK_FILE), _read_yaml(source / "docker-compose.yaml")
        TerminalBenchTaskConfig.model_validate(settings)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        return f"{OLD_TASK_FILE}: {'; '.join(faults)}"
    except ValueError as error:
        return str(error)
    services = compose.get("services") or {}
    if not isinstance(services, Mapping) or not all(isinstance(service, Mapping) for service in services.values()):
        return "docker-compose.yaml: services: must be a mapping from names to their settings"
    return None


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


def _finish(source: Path, target_folder: Path) -> str | None:
    if not (target_folder / "environment" / "Dockerfile").is_file():
        return "it has no Dockerfile in the build context of its docker-compose.yaml"
    if (source / "tests" / "test.sh").exists():
        return "its tests have a test.sh, but Harbor needs this name"
    shutil.copyfile(source / "run-tests.sh", target_folder / "tests" / "run-tests.sh")
    rule = _BY_SUMMARY if read_parser_name(source) == PYTEST else _BY_EXIT_CODE
    (target_folder / "tests" / "test.sh").write_text(_TEST + rule + _VERDICT, encoding="utf-8")
    with (target_folder / "task.toml").open("a", encoding="utf-8") as file:
        file.write(_METADATA)
    return find_task_fault(target_folder)
