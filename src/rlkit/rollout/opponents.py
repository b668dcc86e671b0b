"""Opponents: samplers of a run's earlier weights, and of other checkpoints.

Invariant: the weights of a step follow from the step and `checkpoint.every`, so that a resumed run plays against the
same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from rlkit.config.schema import Config
from rlkit.errors import EnvironmentFault
from rlkit.policy import Sampler
from rlkit.service import Service
from rlkit.service.watch import PatientSampler, ServiceWatch
from rlkit.types import Checkpoint


@dataclass(slots=True, eq=False)
class Opponents:
    """The opponents of a run; `find_saved` is `CheckpointSaver.find_saved`, or None without a run."""

    config: Config
    service: Service
    watch: ServiceWatch
    find_saved: Callable[[int], Awaitable[Checkpoint | None]] | None = None
    _samplers: dict[int | str, PatientSampler] = field(default_factory=dict[int | str, PatientSampler])
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def find(self, weights: int | str, newest: Callable[[], Sampler]) -> Sampler:
        """Return the sampler of a checkpoint, or of a step, counted back from that of `newest` if it is below 0.

        Raises:
            EnvironmentFault: the weights do not exist, or are not saved.
            UsageError, ServiceError: the service does not have the checkpoint, or failed after retries.
        """
        key = weights if isinstance(weights, str) else self._find_due(weights, newest().version)
        async with self._lock:  # all rollouts of a step ask at once
            if key not in self._samplers:
                path, saved_step = await (self._check(key) if isinstance(key, str) else self._find_path(key))
                load = partial(self.service.sampler, model=self.config.model, checkpoint=path)
                sampler = await self.watch.call(load, "loading an opponent", retry=True)
                self._samplers[key] = PatientSampler(sampler, self.watch, saved_step)
            return self._samplers[key]

    def _find_due(self, step: int, version: int) -> int:
        """Return the last step up to an opponent's for which a checkpoint is due; 0 for the start."""
        every, wanted = self.config.checkpoint.every, step if step >= 0 else max(version + step, 0)
        if wanted == 0 or (every and wanted <= version):
            return wanted - wanted % (every or 1)
        step_problem = f"the newest weights are those of step {version}; ask for an earlier step"
        save_problem = "no weights are saved; set checkpoint.every to 1 or more"
        raise EnvironmentFault(f"opponent(step={step}): {step_problem if wanted > version else save_problem}")

    async def _find_path(self, step: int) -> tuple[str | None, int]:
        """Return the sampler weights of a due step, and their own step; None for the base model."""
        saved = await self.find_saved(step) if step and self.find_saved is not None else None
        if saved is None and (step or self.config.load_checkpoint):
            start = "the run began with load_checkpoint: give the checkpoint of sampler weights instead"
            fix = "lower checkpoint.every, or raise checkpoint.keep_last" if step else start
            raise EnvironmentFault(f"an opponent needs the weights of step {step}, which are not saved; {fix}")
        return (None, 0) if saved is None else (saved.sampler, saved.step)

    async def _check(self, path: str) -> tuple[str, int]:
        """Return a checkpoint if it is of the run's model; its step is -1, because it is none of this run."""
        own = self.config.model
        model = await self.watch.call(partial(self.service.model_of, path), "asking for a checkpoint", retry=True)
        if model != own:
            raise EnvironmentFault(f"opponent(checkpoint={path!r}): its model is {model}, and the run trains {own}")
        return path, -1
