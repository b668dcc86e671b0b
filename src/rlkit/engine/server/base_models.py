"""Base models by name.

Invariant: names are resolved, possibly with a download, on a few separate threads and never on the caller's. Weights in
use are not loaded a second time.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch

from rlkit._util.threads import DaemonThreadPool
from rlkit.engine.model.config import ModelConfig, read_config
from rlkit.engine.model.model_files import split_base_name
from rlkit.engine.model.weights import Weights, load_weights
from rlkit.engine.server.futures import NotReady

_log = logging.getLogger(__name__)

# Number of recent models kept in memory while unused.
_RECENT_MAX = 2
# Each lookup may wait for the hub, and clients may ask for any name.
_LOOKUP_THREADS_MAX = 4
# A lookup on this machine takes less time; a download takes longer.
_LOOKUP_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedBase:
    """A base model in memory. Users of its weights keep a reference to it, so it is not loaded twice."""

    name: str
    directory: Path
    weights: Weights


class BaseModels:
    """Base models by name: locate and load them; `resolve` is called on up to four threads concurrently."""

    def __init__(self, resolve: Callable[[str], Path], device: torch.device) -> None:
        self._resolve = resolve
        self._device = device
        self._lock = threading.Lock()
        self._locations: dict[str, tuple[Path, ModelConfig]] = {}
        # Removed at their end: a future keeps the callbacks of the jobs that waited for it.
        self._lookups: dict[str, Future[None]] = {}
        # At exit, Python does not wait for its threads, however long a download takes.
        self._threads = DaemonThreadPool(_LOOKUP_THREADS_MAX, name="rlkit-engine-resolve")
        self._used: WeakValueDictionary[str, LoadedBase] = WeakValueDictionary()
        self._recent: OrderedDict[str, LoadedBase] = OrderedDict()

    def start_lookup(self, name: str) -> Future[None] | None:
        """Return the pending lookup of a model; start it if necessary. None once located. Callable from any thread."""
        with self._lock:
            if name in self._locations:
                return None
            if name not in self._lookups:
                self._lookups[name] = self._threads.submit(self._look_up, name)
            return self._lookups[name]

    def locate(self, name: str) -> tuple[Path, ModelConfig]:
        """Return a model's directory and configuration; `NotReady` while its lookup is pending."""
        lookup = self.start_lookup(name)
        if lookup is not None:
            raise NotReady(lookup)
        return self._locations[name]

    def load(self, name: str) -> LoadedBase:
        """Return a model with its weights; `NotReady` while its lookup is pending. For one thread only."""
        directory, _ = self.locate(name)
        base = self._used.get(name)
        self._recent.pop(name, None)
        while len(self._recent) >= _RECENT_MAX:
            self._recent.popitem(last=False)
        if base is None:
            _log.info("loading %s from %s", name, directory)
            quantisation = split_base_name(name)[1]
            weights = load_weights(directory, self._device, quantisation=quantisation)
            base = LoadedBase(name, directory, weights)
            with self._lock:
                self._used[name] = base
        self._recent[name] = base
        return base

    def context_lengths(self, names: Iterable[str]) -> dict[str, int]:
        """Return the maximum context, in tokens, of the models in use and of `names` with a known location.

        Callable from any thread; waits for pending lookups, for up to 5 s.
        """
        with self._lock:
            names = {*names, *self._used.keys()}
            pending = [future for name, future in self._lookups.items() if name in names]
        wait(pending, timeout=_LOOKUP_WAIT_S)
        return {name: self._locations[name][1].max_positions for name in names if name in self._locations}

    def close(self) -> None:
        """Release all weights and drop the lookups that have not started."""
        self._recent.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look_up(self, name: str) -> None:
        try:
            directory = self._resolve(split_base_name(name)[0])
            self._locations[name] = directory, read_config(directory)
        finally:
            with self._lock:
                del self._lookups[name]  # after a failure, the next request tries again
