"""The models of a server: base weights, models in training, sampler weights.

Invariant: everything here runs on the worker thread, one call at a time; a method that fails leaves the rest usable.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from rlkit.engine import wire
from rlkit.engine.checkpoints import CheckpointInfo, CheckpointStore
from rlkit.engine.config import ModelConfig, read_config
from rlkit.engine.learner import AdamSettings, Learner
from rlkit.engine.lora import Adapter, LoraSettings, merge, new_adapter
from rlkit.engine.losses import make_loss
from rlkit.engine.promises import Promise, proto_answer
from rlkit.engine.sampler import Decoder, SampleRequest, SampleResult
from rlkit.engine.snapshots import Snapshots
from rlkit.engine.stops import StopRule
from rlkit.engine.weights import Weights, load_weights
from rlkit.errors import MissingError, RlkitError, UsageError

_log = logging.getLogger(__name__)

_CORES = torch.get_num_threads()
_ONE_THREAD_BELOW = 256
_BASES_MAX = 2
_MERGED_MAX = 2


@dataclass(frozen=True, slots=True)
class SamplerRef:
    """Which weights to sample from: the base model's, a checkpoint (`path`) or an unnamed `snapshot`."""

    base_model: str
    path: str | None = None
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client may know of a model in training; `directory` holds the base model and its tokeniser."""

    base_model: str
    directory: Path
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """A model in training."""

    base_model: str
    learner: Learner


@dataclass(frozen=True, slots=True, eq=False)
class _Base:
    """A base model that is loaded."""

    directory: Path
    weights: Weights


class Runtime:
    """Loads, trains, saves and samples.

    Args:
        resolve: a base model's name to its directory.
        store: where checkpoints go.
        scratch: a folder of this server's own, removed by `close`.
        threads: how many threads torch uses; by default one for a tiny model and the number of cores for others.
    """

    def __init__(
        self, resolve: Callable[[str], Path], store: CheckpointStore, scratch: Path, threads: int | None
    ) -> None:
        self._threads = threads
        self._resolve = resolve
        self._store = store
        self._snapshots = Snapshots(scratch)
        self._bases: OrderedDict[str, _Base] = OrderedDict()
        self._models: dict[str, _Model] = {}
        self._decoders: OrderedDict[SamplerRef, Decoder] = OrderedDict()
        self._sampling: dict[Decoder, set[Promise]] = {}

    def create(self, model_id: str, base_model: str, settings: LoraSettings, seed: int | None) -> ModelInfo:
        """Make a model with a fresh adapter."""
        base = self._base(base_model)
        weights = base.weights
        adapter = new_adapter(weights.config, settings, seed=secrets.randbits(62) if seed is None else seed)
        self._models[model_id] = _Model(base_model, Learner(weights, adapter))
        return ModelInfo(base_model, base.directory, settings.rank)

    def load(self, model_id: str, path: str, *, optimiser: bool, base_model: str | None) -> ModelInfo:
        """Make a model from a checkpoint, or replace one; with Adam's state if `optimiser` is set."""
        info = self._store.info(path)
        if base_model not in (None, info.base_model):
            raise UsageError(f"{path} was trained from {info.base_model!r} and cannot be loaded into {base_model!r}")
        base = self._base(info.base_model)
        weights = base.weights
        adapter, moments = self._store.load(path, weights.config, trainable=True)
        if optimiser and moments is None:
            raise UsageError(f"{path} holds no optimiser state: save it with save_state, or load the weights only")
        learner = (
            Learner(weights, adapter, moments=moments, steps=info.steps) if optimiser else Learner(weights, adapter)
        )
        self._models[model_id] = _Model(info.base_model, learner)
        return ModelInfo(info.base_model, base.directory, info.settings.rank)

    def train(self, request: wire.TrainRequest) -> bytes:
        """Run a forward or forward-backward request."""
        learner = self._model(request.model_id).learner
        self._set_threads(learner.weights.config)
        loss = make_loss(request.loss, request.settings)
        examples = wire.decode_examples(request.data)
        run = learner.forward if request.forward_only else learner.forward_backward
        return wire.encode_loss(run(examples, loss))

    def optim_step(self, model_id: str, settings: AdamSettings) -> float:
        """Apply the accumulated gradient; its norm before clipping."""
        return self._model(model_id).learner.step(settings)

    def save_state(self, model_id: str, name: str, *, overwrite: bool) -> str:
        """Write a training state; its tinker:// path."""
        model = self._model(model_id)
        return self._store.save(
            model_id,
            "weights",
            name,
            _info(model),
            model.learner.adapter,
            moments=model.learner.moments,
            overwrite=overwrite,
        )

    def save_sampler(self, model_id: str, name: str) -> str:
        """Write sampler weights, which never change once they have a name; their tinker:// path."""
        model = self._model(model_id)
        return self._store.save(model_id, "sampler_weights", name, _info(model), model.learner.adapter)

    def snapshot(self, model_id: str, key: str) -> SamplerRef:
        """Keep a copy of the weights as they are now."""
        model = self._model(model_id)
        self._snapshots.put(key, model.learner.adapter.snapshot())
        return SamplerRef(model.base_model, snapshot=key)

    def sample(self, ref: SamplerRef, spec: wire.SamplingSpec, promise: Promise) -> None:
        """Queue a sampling request; its promise is kept by a later `advance`."""
        base = self._base(ref.base_model)
        if spec.stop_tokens is None:
            stop = StopRule(base.weights.config.eos)
        else:
            decode = _decoder_of(base.directory) if spec.stop_strings else None
            stop = StopRule(frozenset(spec.stop_tokens), spec.stop_strings, decode)
        request = SampleRequest(
            spec.prompt,
            spec.samples,
            spec.max_tokens,
            secrets.randbits(64) if spec.seed is None else spec.seed,
            spec.settings,
            stop,
            spec.prompt_logprobs,
        )
        decoder = self._decoder(ref, base)

        def done(result: SampleResult) -> None:
            self._sampling[decoder].discard(promise)
            promise.resolve(proto_answer(wire.encode_sample(result)))

        decoder.submit(request, done)
        self._sampling.setdefault(decoder, set()).add(promise)

    def advance(self) -> bool:
        """Decode one token for every running sample; whether there is more to do."""
        for ref, decoder in list(self._decoders.items()):
            if not decoder.busy:
                continue
            self._set_threads(decoder.config)
            try:
                decoder.step()
            except Exception as error:
                _log.exception("sampling failed")
                del self._decoders[ref]
                for promise in self._sampling.pop(decoder, set()):
                    fail(promise, error)
        return any(decoder.busy for decoder in self._decoders.values())

    def release(self, session_id: str) -> None:
        """Forget the models and snapshots of a session."""
        for model_id in [m for m in self._models if m.startswith(f"{session_id}:")]:
            del self._models[model_id]
        self._snapshots.drop(f"{session_id}:")

    def unload(self, model_id: str) -> None:
        """Forget a model in training."""
        self._model(model_id)
        del self._models[model_id]

    def contexts(self, names: Iterable[str]) -> dict[str, int]:
        """The longest context, in tokens, of the loaded base models and of `names`. May be called from any thread."""
        found = {name: base.weights.config.max_positions for name, base in list(self._bases.items())}
        for name in set(names) - set(found):
            with suppress(RlkitError):  # whoever samples from it will be told
                found[name] = read_config(self._resolve(name)).max_positions
        return found

    def close(self) -> None:
        """Forget everything."""
        self._models.clear()
        self._bases.clear()
        self._decoders.clear()
        self._snapshots.close()

    def _set_threads(self, config: ModelConfig) -> None:
        """Choose for each model anew: the choice decides the last bits, so that it may depend on the model only."""
        # A thread that waits for another spins. Under a tiny model that is all it does, and where other work runs on
        # the same cores it made decoding twenty times slower.
        tiny = config.hidden_size < _ONE_THREAD_BELOW
        torch.set_num_threads(self._threads or (1 if tiny else _CORES))

    def _model(self, model_id: str) -> _Model:
        if model_id not in self._models:
            raise UsageError(f"there is no model {model_id!r} on this server: it was never made, or its session ended")
        return self._models[model_id]

    def _base(self, name: str) -> _Base:
        if name not in self._bases:
            directory = self._resolve(name)
            _log.info("loading %s from %s", name, directory)
            self._bases[name] = _Base(directory, load_weights(directory))
            while len(self._bases) > _BASES_MAX:
                self._bases.popitem(last=False)
        self._bases.move_to_end(name)
        return self._bases[name]

    def _decoder(self, ref: SamplerRef, base: _Base) -> Decoder:
        if ref not in self._decoders:
            adapter = self._adapter(ref, base)
            self._forget_idle()
            self._decoders[ref] = Decoder(base.weights if adapter is None else merge(base.weights, adapter))
        self._decoders.move_to_end(ref)
        return self._decoders[ref]

    def _adapter(self, ref: SamplerRef, base: _Base) -> Adapter | None:
        if ref.path is not None:
            return self._store.load(ref.path, base.weights.config, trainable=False)[0]
        if ref.snapshot is None:
            return None
        adapter = self._snapshots.get(ref.snapshot)
        if adapter is None:
            raise UsageError("these sampler weights are gone: the session that made them has ended")
        return adapter

    def _forget_idle(self) -> None:
        """Drop merged copies, oldest first, so that a new one keeps the number within its bound."""
        merged = [ref for ref in self._decoders if ref.path or ref.snapshot]
        idle = [ref for ref in merged if not self._decoders[ref].busy]
        for ref in idle[: max(len(merged) - _MERGED_MAX + 1, 0)]:
            self._sampling.pop(self._decoders.pop(ref), None)


def fail(promise: Promise, error: Exception) -> None:
    """Answer with an error: the client's own mistakes as such, everything else as the server's."""
    if isinstance(error, UsageError | MissingError):
        promise.fail(str(error), "user")
    elif isinstance(error, RlkitError):
        promise.fail(str(error), "server")
    else:
        promise.fail(f"{type(error).__name__}: {error}", "server")


def _info(model: _Model) -> CheckpointInfo:
    return CheckpointInfo(model.base_model, model.learner.adapter.settings, model.learner.steps)


@lru_cache(maxsize=4)
def _decoder_of(directory: Path) -> Callable[[Sequence[int]], str]:
    """The tokeniser's own decoding, special tokens kept: a stop string may be one."""
    from rlkit.engine.models import load_tokenizer

    tokenizer = load_tokenizer(directory)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return decode
