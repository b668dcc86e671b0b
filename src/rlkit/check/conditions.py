"""Circumstances that a reward should not depend on: the time of day, chance, a slow model, other rollouts.

Invariant: nothing here is undone. It changes the process for good, so it runs only in the process that a check forks.
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

WORDS = 624
"""Size of a Mersenne Twister's state, in 32-bit words: as many outputs can be chosen before it mixes them again."""

DAY_S = 86_400.0

OFFSETS_S = (
    *(0.37, 1.0, 2.5, 7.0, 61.0, 1_801.0, 18_000.0, 43_200.0),
    *(DAY_S * n for n in (1, 2, 3, 4, 5, 45, 200, 400)),
)
"""To where the wall clock is moved: through the second, the day, the week and the year."""

DELAY_S = 0.03
"""How much longer a slower model takes."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A circumstance of a play.

    Args:
        name: a phrase that follows a reward, such as "played again".
        prepare: called before each play.
        delay_s: how much longer each completion takes.
        at_once: plays at the same time.
        strict: the environment may not fail either; under the others it may miss what it needs.
    """

    name: str
    prepare: Callable[[], None] = lambda: None
    delay_s: float = 0.0
    at_once: int = 1
    strict: bool = False


def make_conditions(seed: int) -> Sequence[Condition]:
    """Return all conditions in their order; from here on, the wall clock of the process can be moved."""
    move_clock, again = make_clock_movable(), partial(seed_chance, seed)
    chance = [partial(force_chance, high=high) for high in (False, True)]
    chance += [partial(seed_chance, seed + number) for number in range(1, 5)]
    return [
        *[Condition("played again", again, strict=True)] * 3,
        Condition("with a slower model", again, delay_s=DELAY_S),
        *(Condition("with other random numbers", prepare) for prepare in chance),
        Condition("played four times at once", at_once=4, strict=True),
        *(Condition(f"with the clock {offset_s:g} s ahead", partial(move_clock, offset_s)) for offset_s in OFFSETS_S),
    ]


class _Moved(type):
    """Makes every real date an instance of its replacement."""

    @override
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])


class _Date(datetime.date, metaclass=_Moved):
    """A date whose `today` asks `time.time`, as that of all subclasses does."""


class _Datetime(datetime.datetime, metaclass=_Moved):
    @classmethod
    @override
    def now(cls, tz: datetime.tzinfo | None = None) -> Self:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    @override
    def utcnow(cls) -> Self:
        return cls.now(datetime.UTC).replace(tzinfo=None)


def make_clock_movable() -> Callable[[float], None]:
    """Replace what reads the wall clock; return a function that sets it so many seconds ahead of the true time.

    Replaced are functions and classes of `time` and `datetime`, and the names bound to them in modules outside the
    standard library. The monotonic clock stays, so that timers and time limits go on as before.
    """
    ahead_s, now, now_ns, write = 0.0, time.time, time.time_ns, time.strftime

    def move(offset_s: float) -> None:
        nonlocal ahead_s
        ahead_s = offset_s

    def moved(split: Callable[[float], time.struct_time]) -> Callable[..., time.struct_time]:
        def split_now(secs: float | None = None) -> time.struct_time:
            return split(now() + ahead_s if secs is None else secs)

        return split_now

    def strftime(form: str, moment: time.struct_time | None = None) -> str:
        return write(form, time.localtime() if moment is None else moment)

    functions = {now: lambda: now() + ahead_s, now_ns: lambda: now_ns() + int(ahead_s * 1e9), write: strftime}
    functions |= {split: moved(split) for split in (time.localtime, time.gmtime)}
    replacements: dict[int, object] = {id(original): function for original, function in functions.items()}
    replacements |= {id(datetime.date): _Date, id(datetime.datetime): _Datetime}
    for name, module in list(sys.modules.items()):
        if module in (time, datetime) or name.split(".")[0] not in sys.stdlib_module_names:
            names: dict[str, object] = getattr(module, "__dict__", {})
            names |= {key: replacements[id(value)] for key, value in list(names.items()) if id(value) in replacements}
    return move


def seed_chance(seed: int) -> None:
    """Put the global generators of `random` and numpy in the state of a seed."""
    random.seed(seed)
    np.random.seed(seed)


def force_chance(*, high: bool) -> None:
    """Make the next draws of the global generators lie next to 0, or next to 1: beyond any threshold."""
    near = random.Random(0)
    outputs = [near.randrange(1 << 16) for _ in range(WORDS)]
    words = [_untempered(0xFFFFFFFF - output if high else output) for output in outputs]
    random.setstate((3, (*words, 0), None))
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), 0, 0, 0.0))


def _untempered(output: int) -> int:
    """The state word that a Mersenne Twister turns into `output`: its tempering, undone step by step (MT19937)."""
    y = output ^ (output >> 18)
    y ^= (y << 15) & 0xEFC60000
    word = y
    for _ in range(4):
        word = y ^ ((word << 7) & 0x9D2C5680)
    y = word
    for _ in range(2):
        word = y ^ (word >> 11)
    return word & 0xFFFFFFFF
