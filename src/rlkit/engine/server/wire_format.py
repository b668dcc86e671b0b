"""Tinker wire format: convert training and sampling requests and answers to and from the engine's types.

Invariant: for any input, a decoder returns a valid value or raises a `UsageError` that names the malformed field. No
sparse tensor is made dense beyond `_SPARSE_VALUES_MAX` values.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, MutableMapping, Sequence
from itertools import groupby

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker import ModelInput, types
from tinker.proto import tinker_public_pb2 as pb

from rlkit.engine.decode.requests import SampleRequest, SampleResult, StopRule, TextDecoder, TokenLogprobs
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.model.lora import LoraSettings
from rlkit.engine.training.learner import AdamSettings, LossOutput
from rlkit.engine.training.packing import Example
from rlkit.errors import UsageError

_SPARSE_VALUES_MAX = 16 << 20
_RANK_MAX = 512
# Larger steps are mistakes: they destroy the weights.
_STEP_MAX = 1000.0
_SEED_MAX = 1 << 63
_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
SAMPLES_MAX = 4096
_TOP_MAX = 1024
# Every sample's text is searched for the stop strings after every token.
_STOP_STRINGS_MAX, _STOP_STRING_CHARACTERS_MAX, _STOP_TOKENS_MAX = 64, 1024, 4096
# Nothing else runs while alternatives are drawn.
_ALTERNATIVES_MAX = 16_384
# The SDK's marker of an empty entry in a table of likeliest tokens.
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0


def decode_train(body: bytes) -> pb.ForwardBackwardRequest:
    """Read a forward or forward-backward request, but for its data and settings, which other functions read."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UsageError("the body is not a ForwardBackwardRequest in protobuf") from error
    return message


def loss_settings(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Read the settings of a loss, in the older field of numbers and the newer one of numbers and texts."""
    settings: dict[str, float | str] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        settings[key] = value.text if value.WhichOneof("value") == "text" else value.number
    return settings


def train_request_position(body: bytes) -> tuple[str, int] | None:
    """Return the model and `seq_id` of a damaged `ForwardBackwardRequest`; None if they cannot be read."""
    message = pb.ForwardBackwardRequest()
    with contextlib.suppress(DecodeError):
        message.ParseFromString(body)
    return (message.model_id, message.seq_id) if message.model_id and message.seq_id else None


def decode_examples(data: Sequence[pb.Datum]) -> list[Example]:
    """Read training sequences; unlisted values of a sparse tensor are 0. Errors name the datum."""
    tensors = (tensor for datum in data for tensor in datum.loss_fn_inputs.values())
    sparse = sum(abs(math.prod(t.shape)) for t in tensors if t.HasField("sparse_csr") and len(t.shape) == 2)
    if sparse > _SPARSE_VALUES_MAX:
        raise UsageError(
            f"data: the sparse tensors have {sparse} values, and a request may have at most {_SPARSE_VALUES_MAX}: "
            "send fewer sequences or columns"
        )
    examples: list[Example] = []
    for i, datum in enumerate(data):
        chunks: list[NDArray[np.int64]] = []
        for chunk in datum.model_input:
            if chunk.WhichOneof("chunk") != "encoded_text":
                raise UsageError(f"data[{i}]: the embedded engine supports text only, not {chunk.WhichOneof('chunk')}")
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
    """Read the adapter settings of a new model."""
    lora = request.lora_config
    if lora is None:
        raise UsageError("create_model: lora_config is missing; the embedded engine only trains LoRA adapters")
    _check_values(
        "lora_config",
        ("rank", lora.rank, 1 <= lora.rank <= _RANK_MAX, f"1 … {_RANK_MAX}"),
        ("seed", lora.seed, lora.seed is None or 0 <= lora.seed < _SEED_MAX, f"0 … {_SEED_MAX - 1}"),
    )
    check_optimizer(request.optimizer_config)
    return LoraSettings(lora.rank, lora.train_attn, lora.train_mlp, lora.train_unembed)


def check_optimizer(config: types.OptimizerConfig | None) -> None:
    """Raise `UsageError` for an optimiser other than AdamW."""
    if config is not None and config.type != "adamw":
        raise UsageError(f"optimizer_config: {config.type!r} is not supported; use adamw")


def adam_settings(request: types.OptimStepRequest) -> AdamSettings:
    """Read the settings of an optimiser step."""
    adam = request.optim_params
    if not isinstance(adam, types.AdamParams):
        raise UsageError(f"optim_step: {adam.type!r} is not supported; use AdamParams")
    _check_values(
        "optim_step",
        ("learning_rate", adam.learning_rate, 0 <= adam.learning_rate <= _STEP_MAX, f"0 … {_STEP_MAX:g}"),
        ("weight_decay", adam.weight_decay, 0 <= adam.weight_decay <= _STEP_MAX, f"0 … {_STEP_MAX:g}"),
        ("grad_clip_norm", adam.grad_clip_norm, 0 <= adam.grad_clip_norm < math.inf, "a number ≥ 0"),
        ("eps", adam.eps, 0 < adam.eps < math.inf, "a number > 0, because a step with gradient 0 would be 0 / 0"),
        ("beta1", adam.beta1, 0 <= adam.beta1 < 1, "in [0, 1)"),
        ("beta2", adam.beta2, 0 <= adam.beta2 < 1, "in [0, 1)"),
    )
    return AdamSettings(adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay, adam.grad_clip_norm)


def encode_loss(output: LossOutput) -> bytes:
    """Encode a `ForwardBackwardOutput`: one record per run of examples with the same number of targets per token."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for trailing_shape, run in groupby(output.logprobs, key=lambda values: values.shape[1:]):
        arrays = list(run)
        record = message.loss_fn_outputs.add()
        record.num_datums = len(arrays)
        field = record.fields["logprobs"]
        field.data = b"".join(values.astype(np.float32).tobytes() for values in arrays)
        field.offsets = np.cumsum([0, *(4 * values.size for values in arrays)], dtype=np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(trailing_shape)
    metrics: MutableMapping[str, float] = message.metrics
    metrics["loss:sum"] = output.loss
    return message.SerializeToString()


def decode_sample(
    request: types.SampleRequest, eos: frozenset[int], load_decoder: Callable[[], TextDecoder]
) -> SampleRequest:
    """Read a sampling request; `UsageError` if the engine does not support it.

    Args:
        eos: stop tokens of a request without its own.
        load_decoder: function that loads the decoder of stop strings; called if there are any.
    """
    if request.record_stability_info:
        raise UsageError("sample: record_stability_info is not supported by the embedded engine")
    params, prompt, last = request.sampling_params, _prompt(request.prompt), request.prompt_logprobs_last_n
    _check_values(
        "sample",
        ("num_samples", request.num_samples, 1 <= request.num_samples <= SAMPLES_MAX, f"1 … {SAMPLES_MAX}"),
        ("max_tokens", params.max_tokens, params.max_tokens is None or params.max_tokens >= 1, "at least 1"),
        ("temperature", params.temperature, 0 <= params.temperature < np.inf, "a number ≥ 0"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "in (0, 1]"),
        ("top_k", params.top_k, params.top_k >= -1, "positive, or -1 for all tokens"),
        ("prompt_logprobs_last_n", last, last is None or last >= 1, "at least 1"),
    )
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        _check_values("sample", (name, value := getattr(request, name), 0 <= value <= _TOP_MAX, f"0 … {_TOP_MAX}"))
    if request.prompt_alt_tokens_k * len(prompt) > _ALTERNATIVES_MAX:
        raise UsageError(
            f"sample: prompt_alt_tokens_k {request.prompt_alt_tokens_k} for {len(prompt)} tokens is more than "
            f"{_ALTERNATIVES_MAX} draws: request fewer, or split the prompt"
        )
    return SampleRequest(
        prompt,
        request.num_samples,
        params.max_tokens,
        secrets.randbits(64) if params.seed is None else params.seed,
        DrawSettings(params.temperature, params.top_k, params.top_p),
        _stop_rule(params.stop, eos, load_decoder),
        top=request.topk_sample_logprobs,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_top=request.topk_prompt_logprobs,
        last_tokens=last,
        targets=_targets(request),
        alternatives=request.prompt_alt_tokens_k,
    )


def encode_sample(result: SampleResult, request: types.SampleRequest) -> bytes:
    """Encode a `SampleResponse`; the scores of sparse targets are encoded with the same sparsity."""
    # Concatenated messages are one message. Encoding in parts takes less memory for a large answer.
    parts: list[bytes] = []
    for sample in result.samples:
        message = pb.SampleResponse()
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.has_stopped else pb.STOP_REASON_LENGTH,
            tokens=sample.tokens.tobytes(),
            logprobs=sample.logprobs.tobytes(),
        )
        if sample.top is not None:
            _set_top(sequence.topk_sampled_logprobs, sample.top)
        parts.append(message.SerializeToString())
    message = pb.SampleResponse()
    scores = result.prompt_scores
    if scores.logprobs is not None:
        message.prompt_logprobs = scores.logprobs.tobytes()
    if scores.top is not None:
        _set_top(message.topk_prompt_logprobs, scores.top)
    if scores.targets is not None and request.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_target_scores(scores.targets, request))
    if scores.alternatives is not None:
        ids, logprobs = scores.alternatives.ids.astype(np.int64), scores.alternatives.logprobs
        message.prompt_alt_tokens.tokens.CopyFrom(pb.Tensor(dense=ids.tobytes(), dtype=pb.DTYPE_INT64, shape=ids.shape))
        message.prompt_alt_tokens.logprobs.CopyFrom(_encode_floats(logprobs))
    return b"".join([*parts, message.SerializeToString()])


def _check_values(kind: str, *rules: tuple[str, float | None, bool, str]) -> None:
    """Raise `UsageError` for the first rule that is broken: a name, its value, whether it is valid, and what is."""
    for name, value, is_valid, wanted in rules:
        if not is_valid:
            raise UsageError(f"{kind}: {name} must be {wanted}, not {value}")


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
        return _to_dense(name, _array(name, csr.values, dtype), starts, columns, shape)
    values = _array(name, tensor.dense, dtype)
    if not shape:
        return values
    if math.prod(shape) != len(values):
        raise UsageError(f"{name}: shape {list(shape)} does not match {len(values)} values")
    return values.reshape(shape)


def _array(name: str, data: bytes, dtype: type[np.generic]) -> NDArray[np.generic]:
    if len(data) % np.dtype(dtype).itemsize:
        raise UsageError(f"{name}: {len(data)} bytes are not a whole number of {np.dtype(dtype)} values")
    return np.frombuffer(data, dtype=dtype)


def _to_dense[T: np.generic](
    name: str,
    values: NDArray[T],
    starts: NDArray[np.int64],
    columns: NDArray[np.int64],
    shape: tuple[int, ...],
    *,
    pad: int = 0,
) -> NDArray[T]:
    """Convert a tensor [N, K] in compressed sparse rows to a dense one, with `pad` for unlisted values."""
    if len(shape) != 2:
        raise UsageError(f"{name}: a sparse tensor needs a shape [N, K], not {list(shape)}")
    if not 0 <= shape[0] * shape[1] <= _SPARSE_VALUES_MAX:
        raise UsageError(f"{name}: shape {list(shape)} is too large; at most {_SPARSE_VALUES_MAX} values are allowed")
    if len(starts) != shape[0] + 1 or starts[0] != 0 or starts[-1] != len(values) or (starts[1:] < starts[:-1]).any():
        raise UsageError(
            f"{name}.crow_indices: {shape[0]} rows need {shape[0] + 1} ascending numbers from 0 to {len(values)}, "
            "the number of values"
        )
    if len(columns) != len(values) or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise UsageError(f"{name}.col_indices: {len(values)} numbers in 0 … {shape[1] - 1} are needed")
    rows = np.repeat(np.arange(shape[0]), np.diff(starts))
    filled = np.zeros(shape, dtype=np.bool_)
    filled[rows, columns] = True
    if np.count_nonzero(filled) != len(values):
        raise UsageError(f"{name}.col_indices: a column is listed twice in a row")
    dense = np.full(shape, pad, dtype=values.dtype)
    dense[rows, columns] = values
    return dense


def _encode_floats(values: NDArray[np.float32]) -> pb.Tensor:
    return pb.Tensor(dense=values.tobytes(), dtype=pb.DTYPE_FLOAT32, shape=values.shape)


def _set_top(target: pb.TopkLogprobs, tokens: TokenLogprobs) -> None:
    """Fill a table in place, because assigning a message to a field would copy it, and it may be large."""
    is_token = tokens.ids >= 0
    target.length, target.k = tokens.ids.shape
    target.token_ids = np.where(is_token, tokens.ids, np.int32(_NO_TOKEN)).tobytes()
    target.logprobs = np.where(is_token, tokens.logprobs, np.float32(_NO_LOGPROB)).tobytes()


def _target_scores(scores: NDArray[np.float32], request: types.SampleRequest) -> pb.Tensor:
    targets = request.target_prompt_logprobs
    values = np.nan_to_num(scores, nan=0.0)
    if targets is None or targets.sparse_crow_indices is None or targets.sparse_col_indices is None:
        return _encode_floats(values)
    starts = np.array(targets.sparse_crow_indices, np.int64)
    columns = np.array(targets.sparse_col_indices, np.int64)
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    csr = pb.SparseCsr(
        values=values[rows, columns].tobytes(), crow_indices=starts.tobytes(), col_indices=columns.tobytes()
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=scores.shape)


def _targets(request: types.SampleRequest) -> NDArray[np.int64] | None:
    """Return the tokens to score at each position of the prompt, dense; −1 for no token."""
    tensor = request.target_prompt_logprobs
    if tensor is None:
        return None
    name = "sample: target_prompt_logprobs"
    shape = tuple(tensor.shape or ())
    if tensor.dtype != "int64" or len(shape) != 2 or min(shape) < 0:
        raise UsageError(f"{name} must be an int64 tensor [prompt tokens − 1, K]")
    values = _integers(name, tensor.data)
    if tensor.sparse_crow_indices is not None:
        starts = _integers(name, tensor.sparse_crow_indices)
        columns = _integers(name, tensor.sparse_col_indices or [])
        return _to_dense(name, values, starts, columns, shape, pad=-1)
    if values.size != shape[0] * shape[1]:
        raise UsageError(f"{name}: shape {list(shape)} does not match {values.size} values")
    return values.reshape(shape)


def _prompt(prompt: ModelInput) -> NDArray[np.int64]:
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise UsageError(f"sample: the embedded engine supports text only, not {chunk.type}")
        tokens.extend(chunk.tokens)
    return _integers("sample: prompt", tokens)


def _integers(name: str, values: Sequence[float]) -> NDArray[np.int64]:
    try:
        integers = np.array(values, np.int64)
    except (OverflowError, ValueError):
        raise UsageError(f"{name} has a number that is not a 64-bit integer") from None
    if np.any(integers != np.array(values)):
        raise UsageError(f"{name} has a number that is not an integer")
    return integers


def _stop_rule(
    stop: str | Sequence[str] | Sequence[int] | None, eos: frozenset[int], load_decoder: Callable[[], TextDecoder]
) -> StopRule:
    if stop is None:
        return StopRule(eos)
    if isinstance(stop, str):
        stop = [stop]
    tokens = [entry for entry in stop if isinstance(entry, int)]
    strings = tuple(entry for entry in stop if isinstance(entry, str))
    if "" in strings:
        raise UsageError("sample: a stop string is empty")
    if len(strings) > _STOP_STRINGS_MAX:
        raise UsageError(f"sample: at most {_STOP_STRINGS_MAX} stop strings are allowed, not {len(strings)}")
    longest = max(map(len, strings), default=0)
    if longest > _STOP_STRING_CHARACTERS_MAX:
        raise UsageError(
            f"sample: a stop string may have at most {_STOP_STRING_CHARACTERS_MAX} characters, not {longest}"
        )
    if len(tokens) > _STOP_TOKENS_MAX:
        raise UsageError(f"sample: at most {_STOP_TOKENS_MAX} stop tokens are allowed, not {len(tokens)}")
    # Stop strings replace the model's own end tokens, like stop tokens.
    return StopRule(frozenset(tokens), strings, load_decoder() if strings else None)
