"""A program of a model in a forked process.

Invariant: all requested isolation layers are in force before the program's first line; otherwise the process ends. The
result is an array of float64 or a text, and is never read as anything else.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import inspect
import linecache
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NoReturn, TypedDict, cast

from . import kernel, landlock, program_filter
from .job import lower_limit

HEADER = struct.Struct("<4sBB2x4Q")
"""Header of a result: a mark, its kind, number of dimensions and their sizes; the numbers or the text follow."""
MARK = b"RLK1"
VALUE, ERROR, MEMORY = range(3)

_DIMENSIONS = 4
_TEXT_BYTES = 4000
_FRAMES = 6
_FILE = "<program>"
_OPEN_FILES = 256
_RESULT, _FAILURE = 3, 4

type Array = Mapping[str, object]


class Request(TypedDict):
    """A request to run a program."""

    source: str
    entry: str
    arguments: dict[str, float]
    helpers: dict[str, str]
    arrays: list[tuple[str, list[int]]]
    timeout_s: float
    cpu_s: int
    memory_bytes: int


class IsolationSetup(TypedDict):
    """Isolation of a program from the machine: names of layers, and accessible paths."""

    layers: list[str]
    readable: list[str]
    listed: list[str]
    writable: list[str]
    base_bytes: int


def run_program(request: Request, data: bytes, setup: IsolationSetup, streams: list[int], failure: int) -> NoReturn:
    """Run the program isolated in this process, and exit.

    Args:
        data: the numbers of its arrays, concatenated.
        streams: descriptors of its input, output and result.
        failure: descriptor for the reason why a layer cannot be applied; closed before the program's first line, which
            could otherwise write to it.
    """
    try:
        _keep_only_streams(streams, failure)
        isolate(setup, cpu_s=request["cpu_s"], memory_bytes=request["memory_bytes"])
    except BaseException as error:
        os.write(_FAILURE, f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES])
        os._exit(1)
    os.close(_FAILURE)
    try:
        # The parent process had no output, so its `sys.stdout` would be buffered like a file.
        output = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stdout = sys.stderr = output
        _run(request, data)
    except MemoryError:
        _send_text(MEMORY, "MemoryError")
    except SystemExit as error:
        _send_text(ERROR, f"the program called sys.exit({error.code!r})")
    except BaseException as error:
        _send_text(ERROR, _format_traceback(error))
    with suppress(BaseException):  # the program may have replaced sys.stdout
        sys.stdout.flush()
    os._exit(0)


def isolate(setup: IsolationSetup, *, cpu_s: int, memory_bytes: int) -> None:
    """Apply the isolation layers to this process; raise an OSError if one cannot be applied."""
    layers = setup["layers"]
    if "limits" in layers:
        _apply_limits(cpu_s, setup["base_bytes"] + memory_bytes)
    if sys.platform == "linux":
        if "capabilities" in layers:
            kernel.keep_capabilities(frozenset())
        if "no_new_privs" in layers:
            kernel.control(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if "landlock" in layers:
            landlock.restrict(setup["readable"], setup["writable"], setup["listed"])
        if "seccomp" in layers and (program := program_filter.program()) is not None:
            kernel.install_filter(program)


def _keep_only_streams(streams: list[int], failure: int) -> None:
    with suppress(PermissionError):  # the first process of a PID namespace is a session leader already
        os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # Move the descriptors away from their final numbers, so that none is overwritten.
    copies = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, _FAILURE + 1) for descriptor in (*streams, failure))
    stdin, stdout, result, failure_copy = copies
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    os.dup2(result, _RESULT)
    os.dup2(failure_copy, _FAILURE)
    os.closerange(_FAILURE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _apply_limits(cpu_s: int, memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
    }
    for number, value in limits.items():
        with suppress(ValueError):  # macOS has no limit on address space
            lower_limit(number, value)


def _run(request: Request, data: bytes) -> None:
    import numpy as np

    names: dict[str, object] = {"__name__": "program", "__file__": _FILE}
    start = 0
    for name, shape in request["arrays"]:
        size = 8 * int(np.prod(shape, dtype=np.int64))
        names[name] = np.frombuffer(data[start : start + size], "<f8").reshape(shape).copy()
        start += size
    for name, path in request["helpers"].items():
        module, _, function = path.partition(":")
        names[name] = getattr(importlib.import_module(module), function)
    source = request["source"]
    linecache.cache[_FILE] = (len(source), None, source.splitlines(keepends=True), _FILE)
    gc.enable()
    exec(compile(source, _FILE, "exec"), names)
    entry = names.get(request["entry"])
    if not callable(entry):
        raise NameError(f"the program defines no function {request['entry']}")
    value = entry(**_select_arguments(entry, request["arguments"]))
    if isinstance(value, tuple) and value:
        value = cast("tuple[object, ...]", value)[0]
    array = np.asarray(cast("object", value))
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{request['entry']} returned an array of {array.dtype}, and must return numbers")
    if array.ndim > _DIMENSIONS:
        raise TypeError(f"{request['entry']} returned {array.ndim} dimensions; there can be {_DIMENSIONS} at most")
    _send(VALUE, np.ascontiguousarray(array, "<f8").tobytes(), array.shape)


def _select_arguments(entry: Callable[..., object], arguments: Mapping[str, float]) -> dict[str, float]:
    """Return the arguments that a function accepts."""
    try:
        parameters = inspect.signature(entry).parameters.values()
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in kinds}
    return {name: value for name, value in arguments.items() if name in names}


def _format_traceback(error: BaseException) -> str:
    """Return the end of a traceback, beginning at the program's first frame."""
    frames = traceback.extract_tb(error.__traceback__)
    start = next((index for index, frame in enumerate(frames) if frame.filename == _FILE), len(frames))
    lines = traceback.format_list(frames[start:][-_FRAMES:])
    return "".join([*lines, *traceback.format_exception_only(error)]).strip()


def _send_text(kind: int, text: str) -> None:
    with suppress(OSError, ValueError):
        _send(kind, text.encode(errors="backslashreplace")[-_TEXT_BYTES:], ())


def _send(kind: int, data: bytes, shape: tuple[int, ...]) -> None:
    sizes = [*shape, *[0] * (_DIMENSIONS - len(shape))]
    remaining = memoryview(HEADER.pack(MARK, kind, len(shape), *sizes) + data)
    while remaining:
        remaining = remaining[os.write(_RESULT, remaining) :]
