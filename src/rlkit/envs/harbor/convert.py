"""Tasks of terminal-bench 1 (`task.yaml`) as tasks of Harbor (`task.toml`), by Harbor's own mapper.

Invariant: a converted task is solved where terminal-bench 1 calls it resolved; what else differs is listed with it.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlkit.envs.harbor.tasks import OLD_TASK_FILE, broken
from rlkit.envs.harbor.terminal_bench.build_contexts import context_fault
from rlkit.envs.harbor.terminal_bench.fidelity import PYTEST, differences, parser_of
from rlkit.errors import UsageError

# terminal-bench 1 reads the lines below pytest's first summary, and looks at no exit code. The output goes to a file: a
# program that the tests leave running would hold a pipe open.
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
# There, the tests ran in the container as the agent had left it, and no task said whether they look at processes.
_METADATA = """
[metadata.rlkit]
tested_processes = true
"""


@dataclass(frozen=True)
class Converted:
    """Outcome of a conversion.

    Args:
        made: new folders.
        failed: reason why a task could not be converted, by its name.
        differences: what is not as it was in terminal-bench 1, by the name of each task where something is not.
    """

    made: Sequence[Path]
    failed: Mapping[str, str]
    differences: Mapping[str, Sequence[str]]


def convert(source: Path, target: Path) -> Converted:
    """Convert a task, or a folder of tasks.

    Args:
        source: holds a `task.yaml`, or folders that do.
        target: a folder that gets a folder for each task; none of those may be there yet.

    Raises:
        UsageError: `source` holds no such task, or `target` is inside it.
    """
    source, target = source.expanduser().absolute(), target.expanduser().absolute()
    if not source.is_dir():
        raise UsageError(f"{source} is no folder")
    if target.is_relative_to(source):
        raise UsageError(f"--to: {target} is inside {source}; take a folder of its own")
    tasks = [source] if (source / OLD_TASK_FILE).is_file() else sorted(old_tasks(source))
    if not tasks:
        raise UsageError(f"{source} holds no {OLD_TASK_FILE} of terminal-bench 1, nor does a folder in it")
    made, failed, differing = list[Path](), dict[str, str](), dict[str, Sequence[str]]()
    for task in tasks:
        if (why := _convert_task(task, target)) is not None:
            failed[task.name] = why
            continue
        made.append(target / task.name)
        if found := differences(task):
            differing[task.name] = found
    return Converted(made, failed, differing)


def old_tasks(folder: Path) -> list[Path]:
    """List the tasks of terminal-bench 1 in a folder."""
    return [path.parent for path in folder.glob(f"*/{OLD_TASK_FILE}")]


def _convert_task(source: Path, target: Path) -> str | None:
    """Convert one task, and return the reason where it cannot be, in one line."""
    from harbor.mappers.terminal_bench import TerminalBenchMapper

    made = target / source.name
    if made.exists():
        return f"{made} already exists: remove it, or take another folder"
    if (why := context_fault(source)) is not None:  # the mapper copies a context from wherever it is
        return why
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        staged = Path(temporary) / source.name
        try:
            shutil.copytree(source, staged)
        except OSError as error:  # such as a link that leads nowhere
            return f"its files cannot be read: {' '.join(str(error).split())}"
        (staged / "solution.yaml").unlink(missing_ok=True)  # the mapper refuses a task for it
        mapped = TerminalBenchMapper().map(staged.parent, target)
    why = " ".join(mapped.failed[0][1].split()) if mapped.failed else _finish(source, made)
    if why is not None:  # a half of a task would be in the way of a second try
        shutil.rmtree(made, ignore_errors=True)
    return why


def _finish(source: Path, made: Path) -> str | None:
    if not (made / "environment" / "Dockerfile").is_file():
        return "it has no Dockerfile in the build context of its docker-compose.yaml"
    if (source / "tests" / "test.sh").exists():
        return "its tests have a test.sh, whose name Harbor needs for its own"
    shutil.copyfile(source / "run-tests.sh", made / "tests" / "run-tests.sh")
    rule = _BY_SUMMARY if parser_of(source) == PYTEST else _BY_EXIT_CODE
    (made / "tests" / "test.sh").write_text(_TEST + rule + _VERDICT, encoding="utf-8")
    with (made / "task.toml").open("a", encoding="utf-8") as file:
        file.write(_METADATA)
    return broken(made)
