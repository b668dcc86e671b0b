"""Commands of the SDK's command line, `tinker`, one after the other in one process: what `test_sdk_cli.py` looks at.

    python sdk_commands.py < COMMANDS    with TINKER_BASE_URL and TINKER_API_KEY set

Standard input is a JSON list of argument lists; standard output is the list of their exit codes and outputs. The
process imports the SDK once, which takes most of a command's time.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from tinker.cli.__main__ import main


def run(arguments: list[str]) -> tuple[int, str, str]:
    stdout, stderr = io.StringIO(), io.StringIO()
    sys.argv = ["tinker", *arguments]
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), stdout.getvalue(), stderr.getvalue()
    return 0, stdout.getvalue(), stderr.getvalue()


if __name__ == "__main__":
    print(json.dumps([run(arguments) for arguments in json.load(sys.stdin)]))
