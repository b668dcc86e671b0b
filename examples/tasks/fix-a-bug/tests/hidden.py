"""Exit with code 0 if `merge` does what its docstring says.

The agent's function runs in a separate process, as a user who can neither read these cases nor write a reward. If there
is only one user, the function cannot write files or start processes, and the cases are only in the memory of this
process, which no other process may read.
"""

import ast
import ctypes
import resource
import subprocess
import sys
from pathlib import Path

CASES = [  # argument and result
    ([(1, 5), (3, 8)], [(1, 8)]),
    ([(1, 9), (2, 3)], [(1, 9)]),
    ([(3, 4), (1, 2), (6, 7)], [(1, 4), (6, 7)]),
    ([(5, 6), (1, 2)], [(1, 2), (5, 6)]),
    ([], []),
]
CALL = """
import sys
sys.path.insert(0, "/app")
from intervals import merge
given = {given!r}
result = merge(given)
print()
print(repr((result, given)))
"""
TIMEOUT_S = 10
NOBODY = 65534
PR_SET_DUMPABLE = 4


def restrict():
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))


def run(argument, **options):
    program = [sys.executable, "-I", "-B", "-c", CALL.format(given=argument)]
    options |= {"timeout": TIMEOUT_S, "cwd": "/", "preexec_fn": restrict}
    return subprocess.run(program, check=False, capture_output=True, text=True, **options)


def call(argument):
    """Return the result, and the argument after the call."""
    try:
        done = run(argument, user=NOBODY, group=NOBODY, extra_groups=[])
    except PermissionError:  # a sandbox that belongs to a user has no other users
        done = run(argument)
    return ast.literal_eval(done.stdout.splitlines()[-1])


def main():
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    Path(__file__).unlink()
    try:
        right = all(call(argument) == (result, argument) for argument, result in CASES)
    except (ValueError, SyntaxError, IndexError, subprocess.TimeoutExpired):
        right = False
    sys.exit(not right)


main()
