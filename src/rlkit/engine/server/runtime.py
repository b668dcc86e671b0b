"""The models of a server: base weights, models in training, weights for sampling.

Invariant: everything here runs on the worker thread, one call at a time, but for `halt`, which any thread may call,
and what `bases` allows, and for samples, which go on inside `train`: no weights change there. A method that fails
leaves the rest usable.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import torch
from tinker import types
from torch import Tensor

from rlkit._util.activity import Activity
from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.requests import StopRule
from rlkit.engine.kernels.devices import BatchLimits, batch_limits
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import Adapter, LoraSettings, make_adapter, make_sampling_weights, merged_bytes
from rlkit.engine.model.model_files import load_tokenizer
from rlkit.engine.model.weights import Weights
from rlkit.engine.server.base_models import Base, Bases
from rlkit.engine.server.futures import Promise
from rlkit.engine.server.samplers import Samplers, Served
from rlkit.engine.server.sessions import ModelInfo, SamplerRef, Target
from rlkit.engine.storage.checkpoints import CheckpointInfo, CheckpointStore
from rlkit.engine.storage.peft import save_external
from rlkit.engine.storage.snapshots import Snapshots
from rlkit.engine.training.learner import AdamSettings, Learner, Others
from rlkit.engine.training.losses import make_loss
from rlkit.engine.wire import training_format
from rlkit.engine.wire.sampling_format import decode_sample, encode_sample
from rlkit.errors import MissingError, UsageError

# A model whose products take microseconds only loses by handing half of them to another thread.
_ONE_LANE_BELOW = 256
# Four adapters on a model of 135 million parameters.
_SERVED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    base: Base
    learner: Learner


class Runtime:
    """Loads, trains, saves and samples.

    `create`, `load` and `sample` raise `NotYet`, before they change anything, while a base model is being looked for.

    Args:
        resolve: a base model's name to its directory; called on other threads.
        scratch: a `scratch_folder` of this server's own, removed by `close`.
        threads: how many cores to use; by default one for a tiny model and all of them for others.
    """

    def __init__(
        self,
        resolve: Callable[[str], Path],
        store: CheckpointStore,
        scratch: Path,
        threads: int | None,
        device: torch.device,
        *,
        activity: Activity,
    ) -> None:
        self._device = device
        self._activity = activity
        self._wide = Lanes(threads if device.type == "cpu" else 1)
        self._narrow = self._wide if threads else Lanes(1)
        self._store = store
        self._snapshots = Snapshots(scratch)
        self.bases = Bases(resolve, device)
        self._models: dict[str, _Model] = {}
        # A GPU's memory holds the cache and what is trained besides: two sets are what can be counted on.
        self._samplers = Samplers(
            self._serve, served_bytes=_SERVED_BYTES if device.type == "cpu" else 0, activity=activity
        )

    def create(self, model_id: str, base_model: str, settings: LoraSettings, seed: int | None) -> ModelInfo:
        """Make a model with a fresh adapter."""
        base = self.bases.load(base_model)
        seed = secrets.randbits(62) if seed is None else seed
        return self._add_model(model_id, base, make_adapter(base.weights.config, settings, seed=seed))

    def load(self, model_id: str, path: str, *, optimiser: bool, base_model: str | None) -> ModelInfo:
        """Make a model from a checkpoint, or replace one; with Adam's state if `optimiser` is set."""
        info = self._store.get(path).info
        if base_model not in (None, info.base_model):
            raise UsageError(f"{path} was trained from {info.base_model!r} and cannot be loaded into {base_model!r}")
        base = self.bases.load(info.base_model)
        adapter, moments = self._store.load(path, base.weights.config)
        if optimiser and moments is None:
            raise UsageError(f"{path} holds no optimiser state: save it with save_state, or load the weights only")
        if optimiser:
            return self._add_model(model_id, base, adapter, moments=moments, steps=info.steps)
        return self._add_model(model_id, base, adapter)

    def train(self, request: training_format.TrainRequest, others: Others) -> bytes:
        """Run a forward or forward-backward request, in which `sample` and `advance` may be called to let others on."""
        learner = self._model(request.model_id).learner
        loss = make_loss(request.loss, request.settings)
        examples = training_format.decode_examples(request.data)
        run = learner.forward if request.forward_only else learner.forward_backward
        return training_format.encode_loss(run(examples, loss, others=others))

    def optim_step(self, model_id: str, settings: AdamSettings) -> float:
        """Apply the accumulated gradient; its norm before clipping."""
        return self._model(model_id).learner.step(settings)

    def save(
        self,
        model_id: str,
        kind: Literal["weights", "sampler_weights"],
        name: str,
        *,
        overwrite: bool = False,
        ttl_s: int | None,
        user_metadata: Mapping[str, str] | None,
    ) -> str:
        """Write a training state, with Adam's moments, or sampler weights; return their tinker:// path."""
        model = self._model(model_id)
        return self._store.save(
            model_id,
            kind,
            name,
            _info(model),
            model.learner.adapter,
            moments=model.learner.moments if kind == "weights" else None,
            overwrite=overwrite,
            ttl_s=ttl_s,
            user_metadata=user_metadata,
        )

    def save_external(self, model_id: str, name: str, *, ttl_s: int | None, recipients: Sequence[str]) -> str:
        """Write a PEFT adapter for downloading; its tinker:// path."""
        model = self._model(model_id)
        adapter = model.learner.adapter
        return save_external(self._store, model_id, name, _info(model), adapter, ttl_s=ttl_s, recipients=recipients)

    def snapshot(self, model_id: str, key: str) -> SamplerRef:
        """Keep a copy of the weights as they are now."""
        model = self._model(model_id)
        self._snapshots.put(key, model.learner.adapter.snapshot())
        return SamplerRef(model.base.name, snapshot=key)

    def drop_snapshot(self, ref: SamplerRef) -> None:
        """Forget a copy from which no new samples will be asked for; those that are running go on."""
        if ref.snapshot is not None:
            self._snapshots.remove(ref.snapshot)

    def sample(self, target: Target, request: types.SampleRequest, promise: Promise) -> None:
        """Queue a sampling request; its promise is kept by a later `advance`, unless it has an answer before."""
        base = self.bases.find(target.ref.base_model)

        def rule(tokens: Sequence[int] | None, strings: Sequence[str]) -> StopRule:
            if tokens is None:
                return StopRule(base.config.eos)
            return StopRule(frozenset(tokens), tuple(strings), _decoder_of(base.directory) if strings else None)

        decoded = decode_sample(request, rule)
        if target.ref.snapshot is not None:
            self._snapshots.use(target.ref.snapshot)  # while its merged weights are kept, nothing else asks for it
        self._samplers.submit(target, decoded, lambda result: encode_sample(result, request), promise)

    def advance(self) -> bool:
        """Decode one token for every running sample; whether there is more to do."""
        self._samplers.advance()
        return self._samplers.busy

    def release(self, session_id: str) -> None:
        """Forget the models and snapshots of a session, whose requests have their answers."""
        for model_id in [m for m in self._models if m.startswith(f"{session_id}:")]:
            del self._models[model_id]
        self._samplers.release(session_id)
        self._snapshots.drop(f"{session_id}:")

    def unload(self, model_id: str) -> None:
        """Forget a model in training."""
        self._model(model_id)
        del self._models[model_id]

    def halt(self) -> None:
        """Let the call that runs end early. May be called from any thread."""
        self._narrow.halt()
        self._wide.halt()

    def close(self) -> None:
        """Forget everything."""
        self._models.clear()
        self.bases.close()
        self._samplers.clear()
        self._snapshots.close()
        self._narrow.close()
        self._wide.close()

    @cached_property
    def _size(self) -> BatchLimits:
        """What decoders share, found out when the first is made: on a GPU it depends on what is free."""
        return batch_limits(self._device)

    def _lanes(self, weights: Weights) -> Lanes:
        return self._narrow if weights.config.hidden_size < _ONE_LANE_BELOW else self._wide

    def _add_model(
        self, model_id: str, base: Base, adapter: Adapter, *, moments: Tensor | None = None, steps: int = 0
    ) -> ModelInfo:
        lanes = self._lanes(base.weights)
        learner = Learner(base.weights, adapter, lanes, moments=moments, steps=steps, activity=self._activity)
        self._models[model_id] = _Model(base, learner)
        return ModelInfo(base.name, base.directory, adapter.settings.rank)

    def _model(self, model_id: str) -> _Model:
        if model_id not in self._models:
            raise UsageError(f"there is no model {model_id!r} on this server: it was never made, or its session ended")
        return self._models[model_id]

    def _serve(self, ref: SamplerRef) -> Served:
        base = self.bases.load(ref.base_model)
        lanes = self._lanes(base.weights)
        weights = make_sampling_weights(base.weights, self._adapter(ref, base), lanes.run)
        decoder = Decoder(weights, lanes, size=self._size, activity=self._activity)
        return Served(decoder, merged_bytes(weights, base.weights), base)

    def _adapter(self, ref: SamplerRef, base: Base) -> Adapter | None:
        if ref.path is not None:
            adapter = self._store.load(ref.path, base.weights.config)[0]
            check_save(self._store, ref)  # afterwards: what another save has taken the place of was not read
            return adapter.to(self._device)
        if ref.snapshot is None:
            return None
        adapter = self._snapshots.get(ref.snapshot)
        if adapter is None:
            raise UsageError(
                "these sampler weights are gone: the session that made them has ended, or many others were used since; "
                "save_weights_for_sampler with a name keeps them"
            )
        return adapter.to(self._device)


def check_save(store: CheckpointStore, ref: SamplerRef) -> None:
    """Raise `MissingError` where the checkpoint to sample from, if it is one, is not there as it was saved."""
    if ref.path is not None and store.get(ref.path).data.name != ref.save:
        raise MissingError(
            f"{ref.path}: these weights were deleted, and others saved under their name: make a new sampling client"
        )


def _info(model: _Model) -> CheckpointInfo:
    return CheckpointInfo(model.base.name, model.learner.adapter.settings, model.learner.steps)


@lru_cache(maxsize=4)
def _decoder_of(directory: Path) -> Callable[[Sequence[int]], str]:
    """The tokeniser's own decoding, special tokens kept: a stop string may be one."""
    tokenizer = load_tokenizer(directory)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return decode
