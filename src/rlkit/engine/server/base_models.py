"""Base models by name.

Invariant: a name is looked up, which may mean a download, on one of a few threads and never on the caller's; and while
anything uses a model's weights they are not loaded a second time.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from rlkit.engine.model.config import ModelConfig, read_config
from rlkit.engine.model.weights import Weights, load_weights
from rlkit.engine.server.futures import NotYet

_log = logging.getLogger(__name__)

# Kept though nothing uses them just now.
_RECENT_MAX = 2
# So many names are looked up at a time: each may wait for the hub, and clients may ask for any.
_LOOKERS_MAX = 4
# What is on this machine is found sooner; a download is not waited for.
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Where a base model is, and what its config.json says."""

    directory: Path
    config: ModelConfig


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Base:
    """A base model that is loaded. Whoever uses its weights holds it, so that they are found again."""

    name: str
    directory: Path
    weights: Weights


class Bases:
    """Finds and loads base models; `resolve` is called on up to four threads at a time."""

    def __init__(self, resolve: Callable[[str], Path], device: torch.device) -> None:
        self._resolve = resolve
        self._device = device
        self._lock = threading.Lock()
        self._found: dict[str, Found] = {}
        self._looking: dict[str, Future[None]] = {}
        self._unlooked: deque[str] = deque()
        self._lookers = 0
        self._used: WeakValueDictionary[str, Base] = WeakValueDictionary()
        self._recent: OrderedDict[str, Base] = OrderedDict()

    def look_for(self, name: str) -> Future[None] | None:
        """Begin to look for a model, unless that was begun; None once it is found. May be called from any thread."""
        with self._lock:
            if name in self._found:
                return None
            if name not in self._looking:
                self._looking[name] = Future()
                self._unlooked.append(name)
                if self._lookers < _LOOKERS_MAX:
                    self._lookers += 1
                    # Not those of an executor, which a program waits for at its end, however long a download takes.
                    threading.Thread(target=self._look_up_all, name="rlkit-engine-resolve", daemon=True).start()
            return self._looking[name]

    def find(self, name: str) -> Found:
        """Return where a model is, or raise `NotYet` while it is being looked for."""
        looking = self.look_for(name)
        if looking is not None:
            raise NotYet(looking)
        return self._found[name]

    def load(self, name: str) -> Base:
        """Return a model with its weights, for one thread only, or raise `NotYet` while it is being looked for."""
        found = self.find(name)
        base = self._used.get(name)
        self._recent.pop(name, None)
        while len(self._recent) >= _RECENT_MAX:
            self._recent.popitem(last=False)
        if base is None:
            _log.info("loading %s from %s", name, found.directory)
            base = Base(name, found.directory, load_weights(found.directory, self._device))
            with self._lock:
                self._used[name] = base
        self._recent[name] = base
        return base

    def contexts(self, names: Iterable[str]) -> dict[str, int]:
        """The longest context, in tokens, of the models in use and of those of `names` that were looked for.

        May be called from any thread; it waits for what is being looked for, a while.
        """
        with self._lock:
            wanted = {*names, *self._used.keys()}
            looking = [future for name, future in self._looking.items() if name in wanted]
        wait(looking, timeout=_LOOK_S)
        return {name: self._found[name].config.max_positions for name in wanted if name in self._found}

    def close(self) -> None:
        """Forget all weights, and look for no more."""
        self._recent.clear()
        with self._lock:
            self._unlooked.clear()

    def _look_up_all(self) -> None:
        while True:
            with self._lock:
                if not self._unlooked:
                    self._lookers -= 1
                    return
                name = self._unlooked.popleft()
                looking = self._looking[name]
            self._look(name, looking)

    def _look(self, name: str, looking: Future[None]) -> None:
        try:
            directory = self._resolve(name)
            found = Found(directory, read_config(directory))
        except Exception as error:
            with self._lock:
                del self._looking[name]  # it may be there when it is asked for again
            looking.set_exception(error)
            return
        with self._lock:
            del self._looking[name]
            self._found[name] = found
        looking.set_result(None)
