"""Program of a worker process: runs math-verify on one pair of answers after the other.

Invariant: a call over the limit ends the process, even if the call holds the interpreter's lock or the parent has died.
The program imports nothing of rlkit, so it runs as a plain script.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

MEMORY_BYTES = 4 << 30
START_S = 120.0
"""Limit for loading math-verify."""

DIGITS = 12
"""Digits to which math-verify compares decimals."""


def main(limit_s: float) -> None:
    """Answer each line `[answer, gold]` by `true`, `false`, or `null` if the gold answer cannot be parsed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, START_S)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted run ends its workers itself
    from math_verify import LatexExtractionConfig, parse, verify

    # The whole text: by default math-verify extracts the last number of a text that it cannot parse.
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def parse_boxed(text: str) -> list[object]:
        boxed = rf"\boxed{{{text}}}"
        return parse(boxed, extraction, fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore  its types are not all known

    def judge(answer: str, gold: str) -> bool | None:
        expected = parse_boxed(gold)
        return verify(expected, parse_boxed(answer), float_rounding=DIGITS, timeout_seconds=None) if expected else None  # pyright: ignore  likewise

    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        answer, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            verdict = judge(answer, gold)
        except Exception:  # any error rejects the answer
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
