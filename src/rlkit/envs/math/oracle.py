"""The program of a worker: asks math-verify about one pair of answers after the other.

Invariant: a call that lasts too long ends the process, also one that holds the interpreter's lock, and also when nobody
is there any more to kill it. It imports nothing of rlkit, so that it starts as a plain script.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

MEMORY_BYTES = 4 << 30
DIGITS = 12
"""Decimals that agree to so many digits are equal to math-verify."""


def main(limit_s: float) -> None:
    """Answer lines of `[answer, gold]` by `true`, `false`, or `null` where the gold answer cannot be read."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted run decides itself when its workers end
    from math_verify import LatexExtractionConfig, parse, verify

    # The whole of the text: by default math-verify takes the last number of what it cannot read.
    whole = [LatexExtractionConfig(boxed_match_priority=0)]

    def read(text: str) -> list[object]:
        boxed = rf"\boxed{{{text}}}"
        return parse(boxed, whole, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore  its types are not all known

    def judge(answer: str, gold: str) -> bool | None:
        wanted = read(gold)
        return verify(wanted, read(answer), float_rounding=DIGITS, timeout_seconds=None) if wanted else None  # pyright: ignore  likewise

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        answer, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            verdict = judge(answer, gold)
        except Exception:  # whatever it raises, it does not take the answer
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
