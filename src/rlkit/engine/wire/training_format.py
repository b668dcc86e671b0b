"""Training requests and answers of the Tinker wire format, to and from the engine's own types; nothing else.

Invariant: whatever bytes come in, a decoder returns a valid value or raises `UsageError`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from rlkit.engine.model.lora import LoraSettings
from rlkit.engine.training.learner import AdamSettings, LossOutput
from rlkit.engine.training.packing import Example
from rlkit.engine.wire.csr import VALUES_MAX, dense_of
from rlkit.errors import UsageError

_RANK_MAX = 512
# Beyond this a step is a mistake: weights go where no number of theirs means anything.
_STEP_MAX = 1000.0
_SEED_MAX = 1 << 63
_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


@dataclass(frozen=True, slots=True, eq=False)
class TrainRequest:
    """A forward or forward-backward request; its data are still encoded (see `decode_examples`)."""

    model_id: str
    seq_id: int
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool
    data: Sequence[pb.Datum]
    fingerprint: bytes


def decode_train(body: bytes) -> TrainRequest:
    """Read a protobuf `ForwardBackwardRequest`."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UsageError("the body is not a ForwardBackwardRequest in protobuf") from error
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        settings[key] = value.text if value.WhichOneof("value") == "text" else value.number
    fingerprint = blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()
    loss, seq_id = message.loss_fn, message.seq_id
    return TrainRequest(message.model_id, seq_id, loss, settings, message.forward_only, message.data, fingerprint)


def place_of(body: bytes) -> tuple[str, int] | None:
    """The model and `seq_id` of a `ForwardBackwardRequest` that cannot be read to its end; None if lost."""
    message = pb.ForwardBackwardRequest()
    with contextlib.suppress(DecodeError):
        message.ParseFromString(body)
    return (message.model_id, message.seq_id) if message.model_id and message.seq_id else None


def decode_examples(data: Sequence[pb.Datum]) -> list[Example]:
    """Read training sequences; what is missing from a sparse tensor is 0. Errors name the datum."""
    tensors = (tensor for datum in data for tensor in datum.loss_fn_inputs.values())
    sparse = sum(abs(math.prod(t.shape)) for t in tensors if t.HasField("sparse_csr") and len(t.shape) == 2)
    if sparse > VALUES_MAX:
        raise UsageError(
            f"data: the sparse tensors come to {sparse} values, and at most {VALUES_MAX} are taken at once: "
            "send fewer sequences or columns in a request"
        )
    examples: list[Example] = []
    for i, datum in enumerate(data):
        chunks: list[NDArray[np.int64]] = []
        for chunk in datum.model_input:
            if chunk.WhichOneof("chunk") != "encoded_text":
                raise UsageError(f"data[{i}]: the embedded engine takes text only, not {chunk.WhichOneof('chunk')}")
            chunks.append(_array(f"data[{i}].model_input", chunk.encoded_text.tokens, np.int32).astype(np.int64))
        inputs = {name: _tensor(f"data[{i}].{name}", tensor) for name, tensor in sorted(datum.loss_fn_inputs.items())}
        if "target_tokens" not in inputs:
            raise UsageError(f"data[{i}]: loss_fn_inputs['target_tokens'] is missing")
        targets = inputs.pop("target_tokens")
        if not np.issubdtype(targets.dtype, np.integer):
            raise UsageError(f"data[{i}]: target_tokens must be integers")
        if not targets.size:
            raise UsageError(f"data[{i}]: target_tokens is empty")
        floats = {name: values.astype(np.float32) for name, values in inputs.items()}
        tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
        examples.append(Example(tokens, targets.astype(np.int64), floats))
    return examples


def lora_settings(request: types.CreateModelRequest) -> LoraSettings:
    """Which adapter a new model gets."""
    lora = request.lora_config
    if lora is None:
        raise UsageError("create_model: lora_config is missing; the embedded engine trains LoRA adapters only")
    if not 1 <= lora.rank <= _RANK_MAX:
        raise UsageError(f"lora_config: rank must be 1 … {_RANK_MAX}, not {lora.rank}")
    if lora.seed is not None and not 0 <= lora.seed < _SEED_MAX:
        raise UsageError(f"lora_config: seed must be 0 … {_SEED_MAX - 1}, not {lora.seed}")
    check_optimizer(request.optimizer_config)
    return LoraSettings(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)


def check_optimizer(config: types.OptimizerConfig | None) -> None:
    """Refuse an optimiser for a new model that is not AdamW."""
    if config is not None and config.type != "adamw":
        raise UsageError(f"optimizer_config: {config.type!r} is not supported; use adamw")


def adam_settings(request: types.OptimStepRequest) -> AdamSettings:
    """How a step is taken."""
    adam = request.optim_params
    if not isinstance(adam, types.AdamParams):
        raise UsageError(f"optim_step: {adam.type!r} is not supported; use AdamParams")
    for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
        if not (math.isfinite(value := getattr(adam, name)) and value >= 0):
            raise UsageError(f"optim_step: {name} must be a number ≥ 0, not {value}")
    for name in ("learning_rate", "weight_decay"):
        if (value := getattr(adam, name)) > _STEP_MAX:
            raise UsageError(f"optim_step: {name} must be at most {_STEP_MAX:g}, not {value:g}")
    if adam.eps == 0:
        raise UsageError("optim_step: eps must be positive: where a gradient is 0, a step would be 0 / 0")
    for name in ("beta1", "beta2"):
        if not 0 <= (value := getattr(adam, name)) < 1:
            raise UsageError(f"optim_step: {name} must be in [0, 1), not {value}")
    return AdamSettings(adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm)


def encode_loss(output: LossOutput) -> bytes:
    """A `ForwardBackwardOutput` in protobuf: one record for each run of examples with equally many targets a token."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for trailing, run in groupby(output.logprobs, key=lambda values: values.shape[1:]):
        members = list(run)
        record = message.loss_fn_outputs.add()
        record.num_datums = len(members)
        field = record.fields["logprobs"]
        field.data = b"".join(values.astype(np.float32).tobytes() for values in members)
        field.offsets = np.cumsum([0, *(4 * values.size for values in members)], dtype=np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing)
    metrics: MutableMapping[str, float] = message.metrics
    metrics["loss:sum"] = output.loss
    return message.SerializeToString()


def _tensor(name: str, tensor: pb.Tensor) -> NDArray[np.generic]:
    if tensor.dtype not in _DTYPES:
        raise UsageError(f"{name}: dtype {tensor.dtype} is not supported; use float32 or int64")
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if len(shape) > 2 or min(shape, default=0) < 0:
        raise UsageError(f"{name}: shape {list(shape[:4])} is not supported; use [N] or [N, K]")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        starts = _array(f"{name}.crow_indices", csr.crow_indices, np.int64).astype(np.int64)
        columns = _array(f"{name}.col_indices", csr.col_indices, np.int64).astype(np.int64)
        return dense_of(name, _array(name, csr.values, dtype), starts, columns, shape)
    values = _array(name, tensor.dense, dtype)
    if not shape:
        return values
    if math.prod(shape) != len(values):
        raise UsageError(f"{name}: shape {list(shape)} does not agree with {len(values)} values")
    return values.reshape(shape)


def _array(name: str, data: bytes, dtype: type[np.generic]) -> NDArray[np.generic]:
    if len(data) % np.dtype(dtype).itemsize:
        raise UsageError(f"{name}: {len(data)} bytes are no whole number of {np.dtype(dtype)} values")
    return np.frombuffer(data, dtype=dtype)
