"""Other circumstances for a process: another time of day, other random numbers.

Invariant: nothing here is undone. It changes the process for good, so it runs only in the process that a check forks.
"""

from __future__ import annotations

import datetime
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import override

import numpy as np

WORDS = 624
"""Size of a Mersenne Twister's state, in 32-bit words: as many outputs can be chosen before it mixes them again."""


class Clock:
    """The wall clock, to be moved. The monotonic clock stays, so that timers and time limits go on as before.

    Replaces what reads the wall clock in `time` and `datetime`, and the names bound to it in modules outside the
    standard library.
    """

    def __init__(self) -> None:
        self.offset_s = 0.0
        date, moment = _shifted_date(self), _shifted_datetime(self)
        clocks = _shifted_functions(self)
        replaced: dict[int, object] = {id(getattr(time, name)): clocks[name] for name in clocks}
        replaced |= {id(datetime.date): date, id(datetime.datetime): moment}
        for name, module in list(sys.modules.items()):
            if module in (time, datetime) or name.split(".")[0] not in sys.stdlib_module_names:
                _rebind(module, replaced)


def _rebind(module: object, replaced: Mapping[int, object]) -> None:
    names: dict[str, object] = getattr(module, "__dict__", {})
    for name, value in list(names.items()):
        if id(value) in replaced:
            names[name] = replaced[id(value)]


def _shifted_functions(clock: Clock) -> dict[str, Callable[..., object]]:
    now, now_ns, local, utc, written = time.time, time.time_ns, time.localtime, time.gmtime, time.strftime

    def seconds() -> float:
        return now() + clock.offset_s

    def nanoseconds() -> int:
        return now_ns() + int(clock.offset_s * 1e9)

    def localtime(secs: float | None = None) -> time.struct_time:
        return local(seconds() if secs is None else secs)

    def gmtime(secs: float | None = None) -> time.struct_time:
        return utc(seconds() if secs is None else secs)

    def strftime(form: str, moment: time.struct_time | None = None) -> str:
        return written(form, localtime() if moment is None else moment)

    return {"time": seconds, "time_ns": nanoseconds, "localtime": localtime, "gmtime": gmtime, "strftime": strftime}


class _Date(type):
    """Makes every real date an instance of the replacement."""

    @override
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])


def _shifted_date(clock: Clock) -> type:
    real = datetime.date

    class Date(real, metaclass=_Date):
        @classmethod
        def today(cls) -> datetime.date:  # pyright: ignore[reportIncompatibleMethodOverride]  a real date
            return real.fromtimestamp(time.time())

    return Date


def _shifted_datetime(clock: Clock) -> type:
    real = datetime.datetime

    class Moment(real, metaclass=_Date):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # pyright: ignore[reportIncompatibleMethodOverride]  a real one
            return real.now(tz) + datetime.timedelta(seconds=clock.offset_s)

        @classmethod
        def today(cls) -> datetime.datetime:  # pyright: ignore[reportIncompatibleMethodOverride]  a real one
            return cls.now()

        @classmethod
        def utcnow(cls) -> datetime.datetime:  # pyright: ignore[reportIncompatibleMethodOverride]  a real one
            return cls.now(datetime.UTC).replace(tzinfo=None)

    return Moment


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
