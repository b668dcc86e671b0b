"""The models of a server: base weights, models in training, sampler weights.

Invariant: everything here runs on the worker thread, one call at a time; a method that fails leaves the rest usable.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from tinker import types

from rlkit.engine import wire
from rlkit.engine.checkpoints import CheckpointInfo, CheckpointStore
from rlkit.engine.config import read_config
from rlkit.engine.lanes import Lanes
from rlkit.engine.learner import AdamSettings, Learner
from rlkit.engine.lora import Adapter, LoraSettings, new_adapter, serve
from rlkit.engine.losses import make_loss
from rlkit.engine.peft import save_external
from rlkit.engine.promises import Promise, proto_answer
from rlkit.engine.requests import SampleResult, Ticket
from rlkit.engine.sampler import Decoder
from rlkit.engine.snapshots import Snapshots
from rlkit.engine.stops import StopRule
from rlkit.engine.weights import Weights, load_weights
from rlkit.engine.wire_sample import decode_sample, encode_sample
from rlkit.errors import MissingError, RlkitError, UsageError

_log = logging.getLogger(__name__)

# A model whose products take microseconds only loses by handing half of them to another thread.
_ONE_LANE_BELOW = 256
_BASES_MAX = 2
_SERVED_MAX = 2


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


type ServedKey = tuple[SamplerRef, str]
"""Weights for sampling, and which save of them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Wanted:
    """A sampling request with all that it needs; `adapter` is None where weights are served already, or have none."""

    key: ServedKey
    base: _Base
    adapter: Adapter | None
    request: types.SampleRequest
    promise: Promise


class Runtime:
    """Loads, trains, saves and samples.

    Args:
        resolve: a base model's name to its directory.
        store: where checkpoints go.
        scratch: a `scratch_folder` of this server's own, removed by `close`.
        threads: how many cores to use; by default one for a tiny model and all of them for others.
        device: where models are: "cpu" or "cuda".
    """

    def __init__(
        self,
        resolve: Callable[[str], Path],
        store: CheckpointStore,
        scratch: Path,
        threads: int | None,
        device: torch.device,
    ) -> None:
        self._device = device
        self._narrow, self._wide = Lanes(1), Lanes(threads if device.type == "cpu" else 1)
        self._resolve = resolve
        self._store = store
        self._snapshots = Snapshots(scratch)
        self._bases: OrderedDict[str, _Base] = OrderedDict()
        self._models: dict[str, _Model] = {}
        self._decoders: OrderedDict[ServedKey, Decoder] = OrderedDict()
        self._waiting: deque[_Wanted] = deque()
        self._sampling: dict[Decoder, dict[Promise, Ticket]] = {}

    def create(self, model_id: str, base_model: str, settings: LoraSettings, seed: int | None) -> ModelInfo:
        """Make a model with a fresh adapter."""
        base = self._base(base_model)
        weights = base.weights
        adapter = new_adapter(weights.config, settings, seed=secrets.randbits(62) if seed is None else seed)
        self._models[model_id] = _Model(base_model, Learner(weights, adapter, self._lanes(weights)))
        return ModelInfo(base_model, base.directory, settings.rank)

    def load(self, model_id: str, path: str, *, optimiser: bool, base_model: str | None) -> ModelInfo:
        """Make a model from a checkpoint, or replace one; with Adam's state if `optimiser` is set."""
        info = self._store.info(path)
        if base_model not in (None, info.base_model):
            raise UsageError(f"{path} was trained from {info.base_model!r} and cannot be loaded into {base_model!r}")
        base = self._base(info.base_model)
        weights = base.weights
        adapter, moments = self._store.load(path, weights.config)
        if optimiser and moments is None:
            raise UsageError(f"{path} holds no optimiser state: save it with save_state, or load the weights only")
        lanes = self._lanes(weights)
        learner = (
            Learner(weights, adapter, lanes, moments=moments, steps=info.steps)
            if optimiser
            else Learner(weights, adapter, lanes)
        )
        self._models[model_id] = _Model(info.base_model, learner)
        return ModelInfo(info.base_model, base.directory, info.settings.rank)

    def train(self, request: wire.TrainRequest) -> bytes:
        """Run a forward or forward-backward request."""
        learner = self._model(request.model_id).learner
        loss = make_loss(request.loss, request.settings)
        examples = wire.decode_examples(request.data)
        run = learner.forward if request.forward_only else learner.forward_backward
        return wire.encode_loss(run(examples, loss))

    def optim_step(self, model_id: str, settings: AdamSettings) -> float:
        """Apply the accumulated gradient; its norm before clipping."""
        return self._model(model_id).learner.step(settings)

    def save_state(
        self,
        model_id: str,
        name: str,
        *,
        overwrite: bool,
        ttl_s: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
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
            ttl_s=ttl_s,
            user_metadata=user_metadata,
        )

    def save_sampler(
        self,
        model_id: str,
        name: str,
        *,
        ttl_s: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Write sampler weights, which never change once they have a name; their tinker:// path."""
        model = self._model(model_id)
        adapter = model.learner.adapter
        return self._store.save(
            model_id, "sampler_weights", name, _info(model), adapter, ttl_s=ttl_s, user_metadata=user_metadata
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
        return SamplerRef(model.base_model, snapshot=key)

    def drop_snapshot(self, ref: SamplerRef) -> None:
        """Forget a copy from which no new samples will be asked for; those that are running go on."""
        if ref.snapshot is not None:
            self._snapshots.drop(ref.snapshot)

    def sample(self, ref: SamplerRef, request: types.SampleRequest, promise: Promise) -> None:
        """Queue a sampling request; its promise is kept by a later `advance`.

        Weights for sampling are large, so that only so many are there at a time; requests for others wait their turn.
        """
        base = self._base(ref.base_model)
        key = self._key(ref)
        # What waits keeps its adapter: the weights may be forgotten meanwhile.
        adapter = None if key in self._decoders else self._adapter(ref, base)
        wanted = _Wanted(key, base, adapter, request, promise)
        if self._waiting or not self._has_room(key):
            self._waiting.append(wanted)
        else:
            self._begin(wanted)

    def _has_room(self, key: ServedKey) -> bool:
        return key in self._decoders or sum(decoder.busy for decoder in self._decoders.values()) < _SERVED_MAX

    def _key(self, ref: SamplerRef) -> ServedKey:
        """What tells weights apart: a name can be deleted and saved under again."""
        return ref, "" if ref.path is None else self._store.get(ref.path).data.name

    def _begin(self, wanted: _Wanted) -> None:
        base, request, promise = wanted.base, wanted.request, wanted.promise

        def rule(tokens: Sequence[int] | None, strings: Sequence[str]) -> StopRule:
            if tokens is None:
                return StopRule(base.weights.config.eos)
            return StopRule(frozenset(tokens), tuple(strings), _decoder_of(base.directory) if strings else None)

        decoded = decode_sample(request, rule)
        decoder = self._decoder(wanted)

        def done(result: SampleResult) -> None:
            self._sampling[decoder].pop(promise, None)
            promise.resolve(proto_answer(encode_sample(result, request)))

        self._sampling.setdefault(decoder, {})[promise] = decoder.submit(decoded, done)

    def cancel(self, promise: Promise) -> None:
        """Stop working on a sampling request, if it is being worked on."""
        self._waiting = deque(wanted for wanted in self._waiting if wanted.promise is not promise)
        for decoder, tickets in self._sampling.items():
            if (ticket := tickets.pop(promise, None)) is not None:
                decoder.cancel(ticket)

    def advance(self) -> bool:
        """Decode one token for every running sample; whether there is more to do."""
        self._admit()
        for ref, decoder in list(self._decoders.items()):
            if not decoder.busy:
                continue
            try:
                decoder.step()
            except Exception as error:
                _log.exception("sampling failed")
                del self._decoders[ref]
                for promise in self._sampling.pop(decoder, {}):
                    fail(promise, error)
        return bool(self._waiting) or any(decoder.busy for decoder in self._decoders.values())

    def _admit(self) -> None:
        """Begin waiting requests, in their order, as far as there is room for their weights."""
        while self._waiting:
            if not self._has_room(self._waiting[0].key):
                return
            wanted = self._waiting.popleft()
            try:
                self._begin(wanted)
            except Exception as error:
                fail(wanted.promise, error)

    def release(self, session_id: str) -> None:
        """Forget the models, samples and snapshots of a session."""
        for model_id in [m for m in self._models if m.startswith(f"{session_id}:")]:
            del self._models[model_id]
        for requests in list(self._sampling.values()):
            for promise in [p for p in requests if p.request_id.startswith(f"{session_id}:")]:
                self.cancel(promise)
        prefix = f"{session_id}:"
        self._waiting = deque(w for w in self._waiting if not w.promise.request_id.startswith(prefix))
        for key in [key for key in self._decoders if (key[0].snapshot or "").startswith(f"{session_id}:")]:
            self._sampling.pop(self._decoders.pop(key), None)
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
        self._narrow.close()
        self._wide.close()

    def _lanes(self, weights: Weights) -> Lanes:
        return self._narrow if weights.config.hidden_size < _ONE_LANE_BELOW else self._wide

    def _model(self, model_id: str) -> _Model:
        if model_id not in self._models:
            raise UsageError(f"there is no model {model_id!r} on this server: it was never made, or its session ended")
        return self._models[model_id]

    def _base(self, name: str) -> _Base:
        if name not in self._bases:
            directory = self._resolve(name)
            _log.info("loading %s from %s", name, directory)
            self._bases[name] = _Base(directory, load_weights(directory, self._device))
            while len(self._bases) > _BASES_MAX:
                self._bases.popitem(last=False)
        self._bases.move_to_end(name)
        return self._bases[name]

    def _decoder(self, wanted: _Wanted) -> Decoder:
        key, weights = wanted.key, wanted.base.weights
        if key not in self._decoders:
            adapter = wanted.adapter or self._adapter(key[0], wanted.base)
            self._forget_idle()
            lanes = self._lanes(weights)
            self._decoders[key] = Decoder(serve(weights, adapter, lanes.run), lanes)
        self._decoders.move_to_end(key)
        return self._decoders[key]

    def _adapter(self, ref: SamplerRef, base: _Base) -> Adapter | None:
        if ref.path is not None:
            return self._store.load(ref.path, base.weights.config)[0].to(self._device)
        if ref.snapshot is None:
            return None
        adapter = self._snapshots.get(ref.snapshot)
        if adapter is None:
            raise UsageError(
                "these sampler weights are gone: the session that made them has ended, or many newer ones were made; "
                "save_weights_for_sampler with a name keeps them"
            )
        return adapter.to(self._device)

    def _forget_idle(self) -> None:
        """Drop weights for sampling, oldest first, so that new ones keep their number within its bound."""
        idle = [ref for ref, decoder in self._decoders.items() if not decoder.busy]
        for ref in idle[: max(len(self._decoders) - _SERVED_MAX + 1, 0)]:
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
