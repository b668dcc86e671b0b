"""Whole `rlkit` commands as processes that need not import anything: a program that forks one for each line of input.

    python -m tests.cli.nursery

A line is a JSON object with `arguments`, `folder` and `environ`. It prints the process id at once and, as a line of its
own, the exit code when asked by the line `"wait"`. A command has a session of its own, and writes `out` and `err` in
its folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

from rlkit.cli import main as rlkit

HEAVY = (
    "pandas",
    "pyarrow.dataset",
    "rlkit.cli.train",
    "rlkit.engine.server.server",
    "rlkit.chat.renderers",
    "rlkit.training.trainer",
    "tinker.resources.training",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "uvicorn.protocols.http.auto",
)


def fork_command(arguments: list[str], folder: str, environ: dict[str, str]) -> int:
    """The id of a process that runs a command."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update(environ)
        for descriptor, name in ((0, os.devnull), (1, "out"), (2, "err")):
            flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(name, flags), descriptor)
        sys.argv = ["rlkit", *arguments]
        rlkit()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Until there are no more lines."""
    for name in HEAVY:
        importlib.import_module(name)
    child = 0
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if request == "wait":
            print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
        else:
            child = fork_command(request["arguments"], request["folder"], request["environ"])
            print(json.dumps(child), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # libraries would have much to say on the way out
