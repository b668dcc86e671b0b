"""A program of a model in a forked process.

Invariant: before the program's first line, all layers that the server was told to use hold, or the process ends; what
comes back is a number of float64 or a piece of text, and is only ever read as that.
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

HEADER = struct.Struct("<4sBB2x4Q")
"""Of a result: a mark, what it is, its dimensions and their sizes; then come the numbers, or the text."""
MARK = b"RLK1"
VALUE, ERROR, MEMORY = range(3)

_DIMENSIONS = 4
_TEXT_BYTES = 4000
_FRAMES = 6
_FILE = "<program>"
_OPEN_FILES = 256
_RESULT, _BROKEN = 3, 4

type Array = Mapping[str, object]


class Request(TypedDict):
    """A program, as the server is asked to run it."""

    source: str
    entry: str
    arguments: dict[str, float]
    helpers: dict[str, str]
    arrays: list[tuple[str, list[int]]]
    timeout_s: float
    cpu_s: int
    memory_bytes: int


class Walls(TypedDict):
    """Isolation of a program from the machine: names of layers, and accessible paths."""

    layers: list[str]
    readable: list[str]
    listed: list[str]
    writable: list[str]
    base_bytes: int


def become(request: Request, data: bytes, walls: Walls, streams: tuple[int, int, int], broken: int) -> NoReturn:
    """Run the program behind walls in this process, which ends with it.

    Args:
        data: the numbers of its arrays, one array after the other.
        streams: descriptors of its input, its output and its result.
        broken: descriptor for the reason why a wall cannot be put up; closed before the program's first line, which
            could otherwise have its failure taken for ours.
    """
    try:
        _only_streams(streams, broken)
        enclose(walls, cpu_s=request["cpu_s"], memory_bytes=request["memory_bytes"])
    except BaseException as error:
        os.write(_BROKEN, f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES])
        os._exit(1)
    os.close(_BROKEN)
    try:
        # What this process was forked from had no output, so these would still take it for a file.
        output = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stdout = sys.stderr = output
        _run(request, data)
    except MemoryError:
        _say(MEMORY, "MemoryError")
    except SystemExit as error:
        _say(ERROR, f"the program called sys.exit({error.code!r})")
    except BaseException as error:
        _say(ERROR, _traceback_of(error))
    with suppress(BaseException):  # the program may have put anything in its place
        sys.stdout.flush()
    os._exit(0)


def enclose(walls: Walls, *, cpu_s: int, memory_bytes: int) -> None:
    """Put up the walls around this process, or raise an OSError where one does not stand."""
    layers = walls["layers"]
    if "limits" in layers:
        _limit(cpu_s, walls["base_bytes"] + memory_bytes)
    if sys.platform == "linux":
        if "capabilities" in layers:
            kernel.keep_capabilities(frozenset())
        if "no_new_privs" in layers:
            kernel.control(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.control(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if "landlock" in layers:
            landlock.restrict(walls["readable"], walls["writable"], walls["listed"])
        if "seccomp" in layers and (program := program_filter.program()) is not None:
            kernel.install_filter(program)


def _only_streams(streams: tuple[int, int, int], broken: int) -> None:
    with suppress(PermissionError):  # the first process of a namespace of its own is its leader already
        os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # Away from the numbers that they are to have.
    copies = (fcntl.fcntl(descriptor, fcntl.F_DUPFD, _BROKEN + 1) for descriptor in (*streams, broken))
    stdin, stdout, result, fault = copies
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    os.dup2(result, _RESULT)
    os.dup2(fault, _BROKEN)
    os.closerange(_BROKEN + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _limit(cpu_s: int, memory_bytes: int) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
    }
    for number, value in limits.items():
        hard = resource.getrlimit(number)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with suppress(ValueError):  # macOS has no limit on address space
            resource.setrlimit(number, (limit, limit))


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
    value = entry(**_accepted(entry, request["arguments"]))
    if isinstance(value, tuple) and value:
        value = cast("tuple[object, ...]", value)[0]
    array = np.asarray(cast("object", value))
    if array.dtype.kind not in "fiub":
        raise TypeError(f"{request['entry']} returned an array of {array.dtype}, and must return numbers")
    if array.ndim > _DIMENSIONS:
        raise TypeError(f"{request['entry']} returned {array.ndim} dimensions; there can be {_DIMENSIONS} at most")
    _send(VALUE, np.ascontiguousarray(array, "<f8").tobytes(), array.shape)


def _accepted(entry: Callable[..., object], arguments: Mapping[str, float]) -> dict[str, float]:
    """Return the arguments that a function takes."""
    try:
        parameters = inspect.signature(entry).parameters.values()
    except (TypeError, ValueError):
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in kinds}
    return {name: value for name, value in arguments.items() if name in names}


def _traceback_of(error: BaseException) -> str:
    """Return the end of a traceback, from the program's own first frame on."""
    frames = traceback.extract_tb(error.__traceback__)
    start = next((index for index, frame in enumerate(frames) if frame.filename == _FILE), len(frames))
    lines = traceback.format_list(frames[start:][-_FRAMES:])
    return "".join([*lines, *traceback.format_exception_only(error)]).strip()


def _say(kind: int, text: str) -> None:
    with suppress(OSError, ValueError):
        _send(kind, text.encode(errors="backslashreplace")[-_TEXT_BYTES:], ())


def _send(kind: int, data: bytes, shape: tuple[int, ...]) -> None:
    sizes = [*shape, *[0] * (_DIMENSIONS - len(shape))]
    left = memoryview(HEADER.pack(MARK, kind, len(shape), *sizes) + data)
    while left:
        left = left[os.write(_RESULT, left) :]
