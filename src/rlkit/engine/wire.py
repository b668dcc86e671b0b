"""The Tinker wire format, to and from the engine's own types; nothing else.

Invariant: whatever bytes come in, a decoder returns a valid value or raises `UsageError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker import ModelInput, types
from tinker.proto import tinker_public_pb2 as pb

from rlkit.engine.draw import DrawSettings
from rlkit.engine.learner import Example, LossOutput
from rlkit.engine.sampler import SampleResult
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
SAMPLES_MAX = 4096


@dataclass(frozen=True, slots=True, eq=False)
class TrainRequest:
    """A forward or forward-backward request; its data are still encoded (see `decode_examples`)."""

    model_id: str
    seq_id: int
    loss: str
    settings: Mapping[str, float | str]
    forward_only: bool
    data: Sequence[pb.Datum]


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
    return TrainRequest(message.model_id, message.seq_id, message.loss_fn, settings, message.forward_only, message.data)


def decode_examples(data: Sequence[pb.Datum]) -> list[Example]:
    """Read training sequences.

    Raises:
        UsageError: names the datum and what is wrong with it.
    """
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
        floats = {name: values.astype(np.float32) for name, values in inputs.items()}
        tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
        examples.append(Example(tokens, targets.astype(np.int64), floats))
    return examples


def encode_loss(output: LossOutput) -> bytes:
    """A `ForwardBackwardOutput` in protobuf."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add()
    record.num_datums = len(output.logprobs)
    field = record.fields["logprobs"]
    field.data = b"".join(values.astype(np.float32).tobytes() for values in output.logprobs)
    field.offsets = np.cumsum([0, *(4 * len(values) for values in output.logprobs)], dtype=np.int64).tobytes()
    field.dtype = pb.DTYPE_FLOAT32
    _set_metrics(message.metrics, {"loss:sum": output.loss})
    return message.SerializeToString()


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSpec:
    """A sampling request as the client gave it; `stop` is None for the model's own end tokens."""

    prompt: NDArray[np.int64]
    samples: int
    max_tokens: int | None
    seed: int | None
    settings: DrawSettings
    stop_tokens: tuple[int, ...] | None
    stop_strings: tuple[str, ...]
    prompt_logprobs: int


def decode_sample(request: types.SampleRequest) -> SamplingSpec:
    """Read a sampling request.

    Raises:
        UsageError: a field is out of range, or asks for something that the engine does not do.
    """
    unsupported = {
        "topk_prompt_logprobs": request.topk_prompt_logprobs > 0,
        "topk_sample_logprobs": request.topk_sample_logprobs > 0,
        "target_prompt_logprobs": request.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k > 0,
        "record_stability_info": bool(request.record_stability_info),
    }
    for name in (name for name, asked in unsupported.items() if asked):
        raise UsageError(f"sample: {name} is not supported by the embedded engine")
    params, prompt = request.sampling_params, _prompt(request.prompt)
    if not 1 <= request.num_samples <= SAMPLES_MAX:
        raise UsageError(f"sample: num_samples must be 1 … {SAMPLES_MAX}, not {request.num_samples}")
    if params.max_tokens is not None and params.max_tokens < 1:
        raise UsageError(f"sample: max_tokens must be at least 1, not {params.max_tokens}")
    if not 0 <= params.temperature < np.inf:
        raise UsageError(f"sample: temperature must be a number ≥ 0, not {params.temperature}")
    if not 0 < params.top_p <= 1:
        raise UsageError(f"sample: top_p must be in (0, 1], not {params.top_p}")
    if params.top_k < 1 and params.top_k not in (-1, 0):
        raise UsageError(f"sample: top_k must be positive, or -1 for all tokens, not {params.top_k}")
    stop_tokens, stop_strings = _stops(params.stop)
    scored = 0
    if request.prompt_logprobs:
        scored = request.prompt_logprobs_last_n or len(prompt)
    return SamplingSpec(
        prompt,
        request.num_samples,
        params.max_tokens,
        params.seed,
        DrawSettings(params.temperature, params.top_k, params.top_p),
        stop_tokens,
        stop_strings,
        scored,
    )


def encode_sample(result: SampleResult) -> bytes:
    """A `SampleResponse` in protobuf."""
    message = pb.SampleResponse()
    for sample in result.samples:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.stopped else pb.STOP_REASON_LENGTH,
            tokens=sample.tokens.tobytes(),
            logprobs=sample.logprobs.tobytes(),
        )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.tobytes()
    return message.SerializeToString()


def _set_metrics(target: MutableMapping[str, float], metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        target[name] = value


def _prompt(prompt: ModelInput) -> NDArray[np.int64]:
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise UsageError(f"sample: the embedded engine takes text only, not {chunk.type}")
        tokens.extend(chunk.tokens)
    return np.array(tokens, dtype=np.int64)


def _stops(stop: str | Sequence[str] | Sequence[int] | None) -> tuple[tuple[int, ...] | None, tuple[str, ...]]:
    """Stop tokens (None for the model's own) and stop strings."""
    if stop is None:
        return None, ()
    if isinstance(stop, str):
        stop = [stop]
    tokens = tuple(entry for entry in stop if isinstance(entry, int))
    strings = tuple(entry for entry in stop if isinstance(entry, str))
    if "" in strings:
        raise UsageError("sample: a stop string is empty")
    # Stop strings stand instead of the model's own end tokens, as stop tokens do.
    return tokens, strings


def _tensor(name: str, tensor: pb.Tensor) -> NDArray[np.generic]:
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise UsageError(f"{name}: sparse tensors are not supported by the embedded engine")
    if tensor.dtype not in _DTYPES:
        raise UsageError(f"{name}: dtype {tensor.dtype} is not supported; use float32 or int64")
    values = _array(name, tensor.dense, _DTYPES[tensor.dtype])
    if len(tensor.shape) > 1:
        raise UsageError(f"{name}: shape {list(tensor.shape)} is not supported; one value for each token is expected")
    return values


def _array(name: str, data: bytes, dtype: type[np.generic]) -> NDArray[np.generic]:
    if len(data) % np.dtype(dtype).itemsize:
        raise UsageError(f"{name}: {len(data)} bytes are no whole number of {np.dtype(dtype)} values")
    return np.frombuffer(data, dtype=dtype)
