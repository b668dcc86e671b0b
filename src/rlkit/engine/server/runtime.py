"""Models of a server: base weights, models in training, weights for sampling.

Invariant: everything here runs on the worker thread, one call at a time, with three exceptions: any thread may call
`halt`; `base_models` has its own rules; samples advance inside `train`, where no weights change. After a method fails,
the other models remain usable.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from rlkit._util.activity import Activity
from rlkit._util.gc_tuning import return_free_memory
from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.requests import TextDecoder
from rlkit.engine.kernels.devices import BatchLimits, batch_limits
from rlkit.engine.kernels.jit_cache import CompileReporter
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import Adapter, LoraSettings, added_bytes, make_adapter, make_sampling_weights
from rlkit.engine.model.model_files import load_tokenizer
from rlkit.engine.model.weights import Weights
from rlkit.engine.server import wire_format
from rlkit.engine.server.base_models import BaseModels, LoadedBase
from rlkit.engine.server.futures import Promise
from rlkit.engine.server.samplers import Samplers, ServedWeights
from rlkit.engine.server.sessions import ModelInfo, SamplerRef, Target
from rlkit.engine.storage.checkpoints import CheckpointInfo, CheckpointStore, write_adapter
from rlkit.engine.storage.peft import write_external
from rlkit.engine.storage.snapshots import Snapshots
from rlkit.engine.training.learner import AdamSettings, Learner, Scheduler
from rlkit.engine.training.losses import make_loss
from rlkit.errors import MissingError, UsageError

# With a smaller hidden size, matrix products take microseconds: a second thread costs more than it saves.
_ONE_LANE_BELOW = 256
# About thirty adapters of rank 32 on a model of 135 million parameters.
_SERVED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, eq=False)
class _TrainedModel:
    base: LoadedBase
    learner: Learner


class Runtime:
    """Models by id: create, load, train, save and sample.

    While a base model's lookup is pending, `create`, `load` and `sample` raise `NotReady` before they change anything.

    Args:
        resolve: function from a base model's name to its directory; called on other threads.
        scratch: `scratch_folder` of this server, removed by `close`.
        threads: number of cores to use; by default one for a tiny model and all of them for others.
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
        self._compile_reporter = CompileReporter(activity)
        self._wide = Lanes(threads if device.type == "cpu" else 1)
        self._narrow = self._wide if threads else Lanes(1)
        self._store = store
        self._snapshots = Snapshots(scratch)
        self.base_models = BaseModels(resolve, device)
        self._models: dict[str, _TrainedModel] = {}
        # A GPU's memory is also used by the cache and models in training: more than two sets may not fit.
        self._samplers = Samplers(
            self._load_served, served_bytes=_SERVED_BYTES if device.type == "cpu" else 0, activity=activity
        )

    def create(self, model_id: str, base_model: str, settings: LoraSettings, seed: int | None) -> ModelInfo:
        """Create a model with a new adapter."""
        base = self.base_models.load(base_model)
        seed = secrets.randbits(62) if seed is None else seed
        return self._add_model(model_id, base, make_adapter(base.weights.config, settings, seed=seed))

    def load(self, model_id: str, path: str, *, optimiser: bool, base_model: str | None) -> ModelInfo:
        """Create or replace a model from a checkpoint; with Adam's state if `optimiser` is set."""
        info = self._store.get(path).info
        if base_model not in (None, info.base_model):
            raise UsageError(f"{path} was trained from {info.base_model!r} and cannot be loaded into {base_model!r}")
        base = self.base_models.load(info.base_model)
        adapter, moments = self._store.load(path, base.weights.config)
        if optimiser and moments is None:
            raise UsageError(f"{path} has no optimiser state: save with save_state, or load the weights only")
        present = self._models.get(model_id)
        if present is not None and (present.base.name, present.learner.adapter.settings) != (
            base.name,
            adapter.settings,
        ):
            raise UsageError(
                f"{path} has another base model, rank or set of trained layers than {model_id}: create a training "
                "client from it, with create_training_client_from_state"
            )
        moments, steps = (moments, info.steps) if optimiser else (None, 0)
        return self._add_model(model_id, base, adapter, moments=moments, steps=steps)

    def train(self, request: pb.ForwardBackwardRequest, scheduler: Scheduler) -> bytes:
        """Run a forward or forward-backward request; `scheduler` may call `sample` and `advance` during it."""
        learner = self._model(request.model_id).learner
        loss = make_loss(request.loss_fn, wire_format.loss_settings(request))
        examples = wire_format.decode_examples(request.data)
        output = learner.run(examples, loss, backward=not request.forward_only, scheduler=scheduler)
        return wire_format.encode_loss(output)

    def optim_step(self, model_id: str, settings: AdamSettings) -> float:
        """Apply the accumulated gradient, and return its norm before clipping."""
        return self._model(model_id).learner.step(settings)

    def save(self, request: types.SaveWeightsRequest | types.SaveWeightsForSamplerRequest, name: str) -> str:
        """Write a training state, with Adam's moments, or sampler weights, and return their tinker:// path."""
        model = self._model(request.model_id)
        is_state = isinstance(request, types.SaveWeightsRequest)
        return self._store.save(
            request.model_id,
            "weights" if is_state else "sampler_weights",
            name,
            _info(model),
            write_adapter(model.learner.adapter, model.learner.moments if is_state else None),
            overwrite=is_state and request.overwrite,
            ttl_s=request.ttl_seconds,
            user_metadata=request.user_metadata,
        )

    def save_external(self, request: types.SaveWeightsExternalRequest) -> str:
        """Write a PEFT adapter for download, and return its tinker:// path."""
        model = self._model(request.model_id)
        info, name = _info(model), request.path
        write = write_external(info, model.learner.adapter, request.age_encryption_recipients or ())
        return self._store.save(request.model_id, "external_weights", name, info, write, ttl_s=request.ttl_seconds)

    def snapshot(self, model_id: str, key: str) -> SamplerRef:
        """Keep a copy of the current weights under `key`."""
        model = self._model(model_id)
        self._snapshots.put(key, model.learner.adapter.snapshot())
        return SamplerRef(model.base.name, snapshot=key)

    def drop_snapshot(self, ref: SamplerRef) -> None:
        """Remove a copy that no new request uses; running samples continue."""
        if ref.snapshot is not None:
            self._snapshots.remove(ref.snapshot)

    def sample(self, target: Target, request: types.SampleRequest, promise: Promise) -> None:
        """Queue a sampling request; a later `advance` resolves its promise if it is still pending."""
        directory, config = self.base_models.locate(target.ref.base_model)
        sample_request = wire_format.decode_sample(request, config.eos, lambda: _load_text_decoder(directory))
        if target.ref.snapshot is not None:
            self._snapshots.touch(target.ref.snapshot)  # served weights do not read the snapshot again
        self._samplers.submit(
            target, sample_request, lambda result: wire_format.encode_sample(result, request), promise
        )

    def advance(self) -> bool:
        """Decode one token for every running sample, and return True while there is more to do."""
        self._samplers.advance()
        return self._samplers.busy

    def release(self, session_id: str) -> None:
        """Release the models and snapshots of an ended session, whose requests are all answered."""
        for model_id in [model_id for model_id in self._models if model_id.startswith(f"{session_id}:")]:
            del self._models[model_id]
        self._samplers.release(session_id)
        self._snapshots.remove_prefix(f"{session_id}:")
        return_free_memory()

    def unload(self, model_id: str) -> None:
        """Release a model in training."""
        self._model(model_id)
        del self._models[model_id]

    def halt(self) -> None:
        """End the running call early. May be called from any thread."""
        self._narrow.halt()
        self._wide.halt()

    def close(self) -> None:
        """Release everything."""
        self._compile_reporter.close()
        self._models.clear()
        self.base_models.close()
        self._samplers.clear()
        self._snapshots.close()
        self._narrow.close()
        self._wide.close()
        return_free_memory()

    @cached_property
    def _limits(self) -> BatchLimits:
        """Batch sizes of all decoders, fixed with the first decoder: on a GPU they depend on the free memory."""
        return batch_limits(self._device)

    def _lanes(self, weights: Weights) -> Lanes:
        return self._narrow if weights.config.hidden_size < _ONE_LANE_BELOW else self._wide

    def _add_model(
        self, model_id: str, base: LoadedBase, adapter: Adapter, *, moments: Tensor | None = None, steps: int = 0
    ) -> ModelInfo:
        lanes = self._lanes(base.weights)
        learner = Learner(base.weights, adapter, lanes, moments=moments, steps=steps, activity=self._activity)
        self._models[model_id] = _TrainedModel(base, learner)
        return ModelInfo(base.name, base.directory, adapter.settings.rank)

    def _model(self, model_id: str) -> _TrainedModel:
        if model_id not in self._models:
            raise UsageError(f"no model {model_id!r} on this server: it was never created, or its session ended")
        return self._models[model_id]

    def _load_served(self, ref: SamplerRef) -> ServedWeights:
        base = self.base_models.load(ref.base_model)
        lanes = self._lanes(base.weights)
        weights = make_sampling_weights(base.weights, self._load_adapter(ref, base), lanes.run)
        decoder = Decoder(weights, lanes, limits=self._limits, activity=self._activity)
        return ServedWeights(decoder, added_bytes(weights, base.weights), base)

    def _load_adapter(self, ref: SamplerRef, base: LoadedBase) -> Adapter | None:
        if ref.path is not None:
            adapter = self._store.load(ref.path, base.weights.config)[0]
            check_checkpoint(self._store, ref)  # after the load: no other save replaced the files meanwhile
            return adapter.to(self._device)
        if ref.snapshot is None:
            return None
        adapter = self._snapshots.get(ref.snapshot)
        if adapter is None:
            raise UsageError(
                "these sampler weights were removed: their session has ended, or many others were used since; to keep "
                "weights, call save_weights_for_sampler with a name"
            )
        return adapter.to(self._device)


def check_checkpoint(store: CheckpointStore, ref: SamplerRef) -> None:
    """Raise `MissingError` if `ref` is a checkpoint that has been deleted or replaced."""
    if ref.path is not None and store.get(ref.path).data.name != ref.save:
        raise MissingError(
            f"{ref.path}: these weights were deleted and others saved under the name: create a new sampling client"
        )


def _info(model: _TrainedModel) -> CheckpointInfo:
    return CheckpointInfo(model.base.name, model.learner.adapter.settings, model.learner.steps)


@lru_cache(maxsize=4)
def _load_text_decoder(directory: Path) -> TextDecoder:
    """Return the tokeniser's `decode` with special tokens kept, because a stop string may be a special token."""
    tokenizer = load_tokenizer(directory)
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))
