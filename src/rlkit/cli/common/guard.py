"""Registration of commands, with their error handling: an exception becomes one line and an exit code.

Invariant: only `--debug` prints a traceback. The traceback of an unexpected exception is saved to a file, and the
exception is reported as a bug.
"""

from __future__ import annotations

import errno
import inspect
import platform
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from rlkit._util.redaction import redact
from rlkit.cli.common.output import Output, rlkit_version
from rlkit.errors import BudgetReached, RlkitError, UsageError

FAILED = 1
MISSING = 3
BUDGET_REACHED = BudgetReached.exit_code
INTERRUPTED = 130

# Errors of the machine, explained by the operating system's message.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE}
_PATH_ERRORS = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


def add_command(
    group: typer.Typer,
    name: str,
    body: Callable[..., int | None],
    *,
    dotenv: bool = True,
    json_help: str = "Print JSON on stdout.",
) -> None:
    """Add a command with its own options, `--json` and `--debug`.

    Args:
        body: function of the command. The first argument is an `Output`, the others are the command's arguments and
            options, and the result is the exit code, or None for 0. The docstring is the command's help.
        dotenv: export the working directory's `.env` first.
    """

    def run(*, json: bool, debug: bool, **options: object) -> None:
        with command(json=json, debug=debug, dotenv=dotenv) as output:
            raise typer.Exit(body(output, **options) or 0)

    _, *command_parameters = inspect.signature(body, eval_str=True).parameters.values()
    shared = {
        "json": Annotated[bool, typer.Option("--json", help=json_help)],
        "debug": Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
    }
    by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [parameter.replace(kind=by_name) for parameter in command_parameters]
    parameters += [inspect.Parameter(key, by_name, default=False, annotation=kind) for key, kind in shared.items()]
    run.__doc__ = body.__doc__
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]  Typer reads it
    group.command(name)(run)


@contextmanager
def command(*, json: bool, debug: bool, dotenv: bool = True) -> Generator[Output]:
    """Run the body of a command.

    With `json`, stdout carries only the results: other output, such as an environment's, is redirected to stderr. With
    `dotenv`, the working directory's `.env` is exported first. An error of the body becomes `typer.Exit` with the
    error's exit code.
    """
    output = Output(out=sys.stdout, err=sys.stderr, json=json)
    try:
        with redirect_stdout(sys.stderr) if json else nullcontext():
            if dotenv:
                from rlkit.config.loading.environment_variables import export_dotenv

                export_dotenv()
            yield output
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        output.note("interrupted")
        if output.json:
            output.data({"error": "interrupted", "type": "KeyboardInterrupt", "exit_code": INTERRUPTED})
        raise typer.Exit(INTERRUPTED) from None
    except Exception as raised:
        from rlkit._util.threads import flatten_error  # imported late to keep `--help` fast

        errors = flatten_error(raised)
        error = errors[0] if len(errors) == 1 else raised
        if debug:
            output.note("".join(traceback.format_exception(error)).rstrip())
        raise typer.Exit(_report(error, output, debug=debug)) from None


def _report(error: BaseException, output: Output, *, debug: bool) -> int:
    if isinstance(error, RlkitError):
        code, message = error.exit_code, str(error)
    elif isinstance(error, OSError) and error.errno in _DISK_ERRORS | _PATH_ERRORS:
        code = UsageError.exit_code if error.errno == errno.ENAMETOOLONG else FAILED
        message = f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}"
    else:
        trace = "" if debug else f"; the traceback is in {_save_traceback(error, output)}"
        text = " ".join(str(error).split())
        code, message = FAILED, f"this is a bug in rlkit: {type(error).__name__}: {text}{trace}"
    output.failure(message, kind=type(error).__name__, exit_code=code)
    return code


def _save_traceback(error: BaseException, output: Output) -> Path | str:
    from rlkit._util.files import write_bytes
    from rlkit._util.paths import runs_dir

    trace = "".join(traceback.format_exception(error))
    versions = f"rlkit {rlkit_version()}, Python {platform.python_version()}, {platform.platform()}"
    path = runs_dir() / f"bug-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.txt"
    try:
        report = redact(f"{versions}\n{' '.join(sys.argv)}\n\n{trace}")
        write_bytes(path, report.encode(errors="backslashreplace"))  # the name of a file may be no UTF-8
    except OSError as unwritable:
        output.note(trace.rstrip())
        return f"the lines above ({path} cannot be written: {unwritable.strerror})"
    return path
