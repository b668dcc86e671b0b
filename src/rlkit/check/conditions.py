"""Conditions on which a reward must not depend: the time, chance, the model's speed, other rollouts.

Invariant: changes to the process are permanent, so this code runs only in the forked process of a check.
"""

from __future__ import annotations

import datetime
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, override

import numpy as np

STATE_WORDS = 624
"""Size of a Mersenne Twister's state in 32-bit words, and the number of outputs that a state determines."""

FORCED_WORDS = 500
"""Number of outputs to force. The rest of the state is random, or a generator would repeat an output of 0 forever."""

LOWEST_WORD, HIGHEST_WORD = 0, 0x12DD9BB3
"""State words of a Mersenne Twister (MT19937) whose outputs are 0 and 2**32 - 1."""

DAY_S = 86_400.0

OFFSETS_S = (
    *(0.37, 1.0, 2.5, 7.0, 61.0, 1_801.0, 18_000.0, 43_200.0),
    *(DAY_S * n for n in (1, 2, 3, 4, 5, 45, 200, 400)),
)
"""Offsets of the wall clock: within the second, the day, the week and the year."""

DELAY_S = 0.03  # additional duration of a completion of a slower model


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition of a rollout."""

    name: str  # phrase that follows a reward, such as "played again"
    prepare: Callable[[], None] = lambda: None  # called before each rollout
    delay_s: float = 0.0  # extra duration of each completion, in seconds
    concurrency: int = 1
    is_strict: bool = False  # also report a failed rollout; other conditions may legitimately break an environment


def make_conditions(seed: int) -> Sequence[Condition]:
    """Return all conditions in their order, and make the wall clock of the process movable."""
    move_clock, again = make_clock_movable(), partial(seed_chance, seed)
    chance = [partial(force_chance, high=high) for high in (False, True)]
    chance += [partial(seed_chance, seed + number) for number in range(1, 5)]
    return [
        *[Condition("played again", again, is_strict=True)] * 3,
        Condition("with a slower model", again, delay_s=DELAY_S),
        *(Condition("with other random numbers", prepare) for prepare in chance),
        Condition("played four times at once", concurrency=4, is_strict=True),
        *(Condition(f"with the clock {offset_s:g} s ahead", partial(move_clock, offset_s)) for offset_s in OFFSETS_S),
    ]


class _AcceptsOriginal(type):
    """Metaclass that makes every real date an instance of its replacement."""

    @override
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])


class _Date(datetime.date, metaclass=_AcceptsOriginal):
    """Date whose `today` calls `time.time`, as in every subclass."""


class _Datetime(datetime.datetime, metaclass=_AcceptsOriginal):
    @classmethod
    @override
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    @override
    def utcnow(cls) -> Self:
        return cls.now(datetime.UTC).replace(tzinfo=None)


def make_clock_movable() -> Callable[[float], None]:
    """Replace the functions that read the wall clock; return a function that moves the clock ahead by some seconds.

    Replaces functions and classes of `time` and `datetime`, also where other modules imported them by name. The
    monotonic clock, which timers and time limits use, does not change.
    """
    ahead_s, now, now_ns, write = 0.0, time.time, time.time_ns, time.strftime

    def move(offset_s: float) -> None:
        nonlocal ahead_s
        ahead_s = offset_s

    def split(convert: Callable[[float], time.struct_time], secs: float | None = None, /) -> time.struct_time:
        return convert(time.time() if secs is None else secs)

    def strftime(form: str, moment: time.struct_time | None = None) -> str:
        return write(form, time.localtime() if moment is None else moment)

    replacements: dict[int, object] = {
        id(now): lambda: now() + ahead_s,
        id(now_ns): lambda: now_ns() + int(ahead_s * 1e9),
        id(write): strftime,
        id(time.localtime): partial(split, time.localtime),
        id(time.gmtime): partial(split, time.gmtime),
        id(datetime.date): _Date,
        id(datetime.datetime): _Datetime,
    }
    for name, module in list(sys.modules.items()):
        if module in (time, datetime) or name.split(".")[0] not in sys.stdlib_module_names:
            names: dict[str, object] = getattr(module, "__dict__", {})
            names |= {key: replacements[id(value)] for key, value in list(names.items()) if id(value) in replacements}
    return move


def seed_chance(seed: int) -> None:
    """Seed the global generators of `random` and numpy."""
    random.seed(seed)
    np.random.seed(seed)


def force_chance(*, high: bool) -> None:
    """Make the next draws of the global generators close to 0, or with `high` close to 1."""
    rest = random.Random(0)
    words = [HIGHEST_WORD if high else LOWEST_WORD] * FORCED_WORDS
    words += [rest.getrandbits(32) for _ in range(STATE_WORDS - FORCED_WORDS)]
    random.setstate((3, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))
