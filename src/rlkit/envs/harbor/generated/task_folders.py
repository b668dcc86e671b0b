"""Task folders of generated tasks, for Harbor.

Invariant: a folder of tasks is complete or missing, even if two processes write it concurrently. The tests of a task
pass only if its instruction is completely carried out.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from rlkit._util.files.lock import make_once
from rlkit._util.paths import cache_dir, expand_user
from rlkit.envs.harbor.generated.file_tasks import FileTask, FileTasksSettings, generate_file_tasks
from rlkit.errors import UsageError

_SETTINGS = """schema_version = "1.4"

[metadata]
difficulty = "easy"
level = {level}

[metadata.rlkit]
tested_folders = ["/app"]

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = 1024
network_mode = "no-network"
"""

_TESTS = r"""#!/bin/bash
# holds FILE WORD...: the file has a word on each line, and nothing else; the last line may lack its end.
holds() {{
  local file=$1 lines
  shift
  [ -f "$file" ] && [ ! -L "$file" ] || return 1
  [ $# -gt 0 ] || {{ [ ! -s "$file" ]; return; }}
  lines=$(printf '%s\n' "$@")
  printf '%s\n' "$lines" | cmp -s - "$file" || printf '%s' "$lines" | cmp -s - "$file"
}}
is_gone() {{ [ ! -e "$1" ] && [ ! -L "$1" ]; }}
is_folder() {{ [ -d "$1" ] && [ ! -L "$1" ]; }}
check() {{ "$@" || {{ echo "not so: $*"; reward=0; }}; }}

reward=1
cd /app || reward=0
{checks}
echo $reward > /logs/verifier/reward.txt
"""


def make_task_files(task: FileTask) -> Mapping[str, str]:
    """Return the content of each file of a Harbor task folder, by path."""
    level = task.task_id.partition("/")[2][0]
    dockerfile = "FROM ubuntu:24.04\n\nWORKDIR /app\n" + ("COPY files/ ./\n" if task.files else "")
    return {
        "task.toml": _SETTINGS.format(level=level),
        "instruction.md": f"{task.instruction}\n",
        "environment/Dockerfile": dockerfile,
        **{f"environment/files/{path}": text for path, text in task.files.items()},
        "tests/test.sh": _TESTS.format(checks="\n".join(f"check {check}" for check in task.checks)),
        "solution/solve.sh": f"#!/bin/bash\nset -e\ncd /app\n{task.solution}\n",
    }


def cache_file_tasks(settings: FileTasksSettings) -> Path:
    """Return the folder of the tasks in rlkit's cache; write it if it is missing."""
    texts = _make_texts(settings)
    digest = hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()
    return make_once(cache_dir() / "file-tasks" / digest, lambda unfinished: _write(texts, unfinished))


def write_file_tasks(settings: FileTasksSettings, target: Path) -> int:
    """Write the tasks to a folder and return their number; UsageError if it is not empty or cannot be written."""
    target = expand_user(target).absolute()
    temporary, texts = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp", _make_texts(settings)
    try:
        if target.is_dir() and any(target.iterdir()):
            raise UsageError(f"--to: {target} exists and is not empty; choose another folder")
        _write(texts, temporary)
        temporary.rename(target)
    except NotADirectoryError:
        raise UsageError(f"--to: {target} is or lies in a file; choose another folder") from None
    except OSError as error:
        raise UsageError(f"--to: {target} cannot be written: {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return len(texts)


def _make_texts(settings: FileTasksSettings) -> Mapping[str, Mapping[str, str]]:
    return {task.task_id: make_task_files(task) for task in generate_file_tasks(settings)}


def _write(texts: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    for name, files in texts.items():
        for path, text in files.items():
            file = folder / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
