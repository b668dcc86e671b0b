"""Tokens, training sequences and answers as types of the Tinker SDK, and back.

Invariant: a conversion changes no token and no number.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tinker import types

from rlkit.algorithms.losses import CrossEntropy, Loss
from rlkit.algorithms.references import Scores
from rlkit.errors import ServiceError
from rlkit.types import Completion, Datum, Floats, Prompt, Tokens


def to_completion(sequence: types.SampledSequence) -> Completion:
    """Return a sample."""
    # Use the arrays where present: the SDK's `tokens` would convert them to lists.
    tokens = sequence.tokens if sequence.tokens_np is None else sequence.tokens_np
    logprobs = sequence.logprobs if sequence.logprobs_np is None else sequence.logprobs_np
    return Completion(
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.asarray([] if logprobs is None else logprobs, np.float32),
        stop=sequence.stop_reason,
    )


def model_input(prompt: Prompt, *, as_arrays: bool = False) -> types.ModelInput:
    """Return a prompt as chunks of the SDK: runs of tokens and images, in order.

    Args:
        as_arrays: keep tokens as arrays instead of lists, for training data, which is sent as protobuf. A list of
            numbers takes ten times the memory.
    """

    def text_chunk(tokens: Tokens) -> types.EncodedTextChunk:  # without validation, which integers do not need
        return types.EncodedTextChunk.model_construct(tokens=tokens if as_arrays else tokens.tolist())

    chunks: list[types.ModelInputChunk] = []  # `list[…]()` would take 1 µs
    start = 0
    for image in prompt.images:
        if image.start > start:
            chunks.append(text_chunk(prompt.tokens[start : image.start]))
        chunks.append(types.ImageChunk(data=image.data, format=image.format, expected_tokens=image.length))
        start = image.start + image.length
    if start < len(prompt):
        chunks.append(text_chunk(prompt.tokens[start:]))
    return types.ModelInput(chunks=chunks)


def to_datum(datum: Datum, loss: Loss) -> types.Datum:
    """Return a training sequence with the inputs of a loss; of several targets, the first is the sequence's token."""
    weights = "weights" if isinstance(loss, CrossEntropy) else "advantages"
    targets = datum.targets if datum.top is None else np.column_stack([datum.targets, datum.top[0]])
    inputs = {
        "target_tokens": types.TensorData.from_numpy(targets.astype(np.int64)),
        weights: types.TensorData.from_numpy(datum.advantages),
    }
    if not isinstance(loss, CrossEntropy):
        inputs["logprobs"] = types.TensorData.from_numpy(datum.logprobs)
    if loss.has_sequence_ratio:
        inputs["sequence_ratio_mask"] = types.TensorData.from_numpy(datum.mask.astype(np.float32))
    return types.Datum(model_input=model_input(datum.prompt, as_arrays=True), loss_fn_inputs=inputs)


def find_logprobs(output: Mapping[str, types.TensorData]) -> Floats:
    """Return the log-probability of each token of a sequence, [N] float32, from an output of a loss."""
    logprobs = np.asarray(output["logprobs"].to_numpy(), np.float32)
    return logprobs if logprobs.ndim == 1 else logprobs[:, 0]


def to_scores(response: types.SampleResponse, *, count: int, top: int) -> Scores:
    """Return the scores of a prompt of `count` tokens, with `top` likeliest tokens; ServiceError if some lack."""
    logprobs, tops = response.prompt_logprobs_np, response.topk_prompt_logprobs_np
    if logprobs is None and response.prompt_logprobs is not None:
        logprobs = np.array(response.prompt_logprobs, np.float32)  # None becomes NaN
    if logprobs is None or len(logprobs) != count:
        answers = 0 if logprobs is None else len(logprobs)
        raise ServiceError(f"log-probabilities: the service gave {answers} for {count} tokens")
    if not top:
        return Scores(logprobs, np.empty((count, 0), np.int32), np.empty((count, 0), np.float32))
    if tops is None or len(tops.logprobs) != count:
        raise ServiceError(f"log-probabilities: the service did not give the likeliest tokens of {count} tokens")
    return Scores(logprobs, tops.token_ids, tops.logprobs)
