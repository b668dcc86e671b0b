"""Sampling requests and answers of the Tinker wire format, to and from the engine's own types.

Invariant: whatever a client sends, `decode_sample` returns a valid value or raises `UsageError`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tinker import ModelInput, types
from tinker.proto import tinker_public_pb2 as pb

from rlkit.engine.decode.requests import SampleRequest, SampleResult, StopRule, TokenLogprobs
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.wire.csr import dense_of
from rlkit.errors import UsageError

SAMPLES_MAX = 4096
_TOP_MAX = 1024
# Strings are looked for in every sample's text at every token.
_STOP_STRINGS_MAX, _STOP_STRING_CHARACTERS_MAX, _STOP_TOKENS_MAX = 64, 1024, 4096
# While they are drawn nothing else is done.
_ALTERNATIVES_MAX = 16_384
# What the SDK reads as "nothing here" in a table of likeliest tokens.
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0

type StopRules = Callable[[Sequence[int] | None, Sequence[str]], StopRule]
"""The rule for stop tokens, None for the model's own, and stop strings."""


def decode_sample(request: types.SampleRequest, rule: StopRules) -> SampleRequest:
    """Read a sampling request; `UsageError` where it asks for something that the engine does not do."""
    if request.record_stability_info:
        raise UsageError("sample: record_stability_info is not supported by the embedded engine")
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
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if not 0 <= getattr(request, name) <= _TOP_MAX:
            raise UsageError(f"sample: {name} must be 0 … {_TOP_MAX}, not {getattr(request, name)}")
    if request.prompt_alt_tokens_k * len(prompt) > _ALTERNATIVES_MAX:
        raise UsageError(
            f"sample: prompt_alt_tokens_k {request.prompt_alt_tokens_k} for {len(prompt)} tokens is more than "
            f"{_ALTERNATIVES_MAX} draws: ask for fewer, or for parts of the prompt"
        )
    last = request.prompt_logprobs_last_n
    if last is not None and last < 1:
        raise UsageError(f"sample: prompt_logprobs_last_n must be at least 1, not {last}")
    return SampleRequest(
        prompt,
        request.num_samples,
        params.max_tokens,
        secrets.randbits(64) if params.seed is None else params.seed,
        DrawSettings(params.temperature, params.top_k, params.top_p),
        rule(*_stops(params.stop)),
        top=request.topk_sample_logprobs,
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_top=request.topk_prompt_logprobs,
        last_tokens=last,
        targets=_targets(request),
        alternatives=request.prompt_alt_tokens_k,
    )


def encode_sample(result: SampleResult, request: types.SampleRequest) -> bytes:
    """A `SampleResponse` in protobuf; scores of sparse targets are sparse in the same way."""
    # Encoded messages that stand one after another are one message: in pieces, a large answer takes less memory.
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
        message.prompt_alt_tokens.logprobs.CopyFrom(_floats(logprobs))
    return b"".join([*parts, message.SerializeToString()])


def _floats(values: NDArray[np.float32]) -> pb.Tensor:
    return pb.Tensor(dense=values.tobytes(), dtype=pb.DTYPE_FLOAT32, shape=values.shape)


def _set_top(target: pb.TopkLogprobs, tokens: TokenLogprobs) -> None:
    """Fill in a table in its place: it may be large, and a message that is put into another is copied."""
    there = tokens.ids >= 0
    target.length, target.k = tokens.ids.shape
    target.token_ids = np.where(there, tokens.ids, np.int32(_NO_TOKEN)).tobytes()
    target.logprobs = np.where(there, tokens.logprobs, np.float32(_NO_LOGPROB)).tobytes()


def _target_scores(scores: NDArray[np.float32], request: types.SampleRequest) -> pb.Tensor:
    targets = request.target_prompt_logprobs
    exact = np.nan_to_num(scores, nan=0.0)
    if targets is None or targets.sparse_crow_indices is None or targets.sparse_col_indices is None:
        return _floats(exact)
    starts = np.array(targets.sparse_crow_indices, np.int64)
    columns = np.array(targets.sparse_col_indices, np.int64)
    rows = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    csr = pb.SparseCsr(
        values=exact[rows, columns].tobytes(), crow_indices=starts.tobytes(), col_indices=columns.tobytes()
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=scores.shape)


def _targets(request: types.SampleRequest) -> NDArray[np.int64] | None:
    """The tokens to score at each position of the prompt, dense, −1 where there is none."""
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
        return dense_of(name, values, starts, columns, shape, pad=-1)
    if values.size != shape[0] * shape[1]:
        raise UsageError(f"{name}: shape {list(shape)} does not agree with {values.size} values")
    return values.reshape(shape)


def _prompt(prompt: ModelInput) -> NDArray[np.int64]:
    tokens: list[int] = []
    for chunk in prompt.chunks:
        if not isinstance(chunk, types.EncodedTextChunk):
            raise UsageError(f"sample: the embedded engine takes text only, not {chunk.type}")
        tokens.extend(chunk.tokens)
    return _integers("sample: prompt", tokens)


def _integers(name: str, values: Sequence[float]) -> NDArray[np.int64]:
    try:
        found = np.array(values, np.int64)
    except (OverflowError, ValueError):
        raise UsageError(f"{name} holds a number that is no 64-bit integer") from None
    if np.any(found != np.array(values)):
        raise UsageError(f"{name} holds a number that is no integer")
    return found


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
    if len(strings) > _STOP_STRINGS_MAX:
        raise UsageError(f"sample: {len(strings)} stop strings are given, and at most {_STOP_STRINGS_MAX} are taken")
    longest = max(map(len, strings), default=0)
    if longest > _STOP_STRING_CHARACTERS_MAX:
        raise UsageError(
            f"sample: a stop string has {longest} characters, and at most {_STOP_STRING_CHARACTERS_MAX} are taken"
        )
    if len(tokens) > _STOP_TOKENS_MAX:
        raise UsageError(f"sample: {len(tokens)} stop tokens are given, and at most {_STOP_TOKENS_MAX} are taken")
    # Stop strings stand instead of the model's own end tokens, as stop tokens do.
    return tokens, strings
