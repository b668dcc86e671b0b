"""Prefill: run prompts through the model, for their keys and values, next-token logits, and scores.

Invariant: a prompt's results do not depend on other prompts in the pass, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkit.engine.decode.requests import PromptScores, SampleRequest, TokenLogprobs
from rlkit.engine.decode.token_sampling import draw_tokens
from rlkit.engine.model.attention import lay_out
from rlkit.engine.model.ops import matmul, pad_rows
from rlkit.engine.model.transformer import compute_hidden
from rlkit.engine.model.weights import Weights

_HEAD_ROWS = 64  # positions per product with the output layer; bounds the memory of logits [n, V]


@dataclass(frozen=True, slots=True, eq=False)
class PrefilledPrompt:
    """A prompt's last logits [V], keys and values [layers, kv_heads, P, D], and the scores for each request."""

    logits: Tensor
    keys: Tensor
    values: Tensor
    scores: Sequence[PromptScores]


@torch.inference_mode()
def prefill(weights: Weights, groups: Sequence[Sequence[SampleRequest]]) -> list[PrefilledPrompt]:
    """Run the common prompt of each group of requests, and compute the scores that each request needs."""
    config = weights.config
    prompts = [group[0].prompt for group in groups]
    lengths = [len(prompt) for prompt in prompts]
    tokens = pad_rows(torch.from_numpy(np.concatenate(prompts))).to(weights.embedding.device)
    embedding = weights.embedding
    keys = embedding.new_empty(config.layers, len(tokens), config.kv_heads, config.head_dim)
    values = torch.empty_like(keys)

    def store_kv(layer: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        keys[layer], values[layer] = layer_keys, layer_values

    hidden = compute_hidden(weights, tokens, lay_out(lengths), store_kv=store_kv)
    ends = np.cumsum(lengths)
    last = compute_logits(weights, hidden[torch.from_numpy(ends - 1).to(hidden.device)])
    results: list[PrefilledPrompt] = []
    for i, (group, end, n) in enumerate(zip(groups, ends.tolist(), lengths, strict=True)):
        rows = slice(end - n, end)
        scores = [_score_prompt(weights, hidden[rows], request) for request in group]
        prompt_keys, prompt_values = (tensor[:, rows].transpose(1, 2) for tensor in (keys, values))
        results.append(PrefilledPrompt(last[i], prompt_keys, prompt_values, scores))
    return results


def compute_logits(weights: Weights, hidden: Tensor) -> Tensor:
    """Return logits [n, V] float32 of `hidden [n, E]`; `weights` come from `make_sampling_weights`."""
    return matmul(pad_rows(hidden), weights.output)[: len(hidden)].float()


def top_tokens(logprobs: Tensor, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return ids and log-probabilities, [n, min(k, V)], of the likeliest tokens in each row of `logprobs`, in order."""
    top = torch.topk(logprobs, min(k, logprobs.shape[-1]), dim=-1)
    return top.indices.to(torch.int32).cpu().numpy(), top.values.cpu().numpy()


def _score_prompt(weights: Weights, hidden: Tensor, request: SampleRequest) -> PromptScores:
    """Return the scores of the prompt of `request`, whose hidden states are `hidden [P, E]`."""
    length, first = len(request.prompt), request.score_start
    scores = _empty_scores(request)
    if first >= length:
        return scores
    key = np.array([request.seed % 2**64, 2**64 - 1], dtype=np.uint64)  # the second word of a sample's key is 0
    random = np.random.Generator(np.random.Philox(key=key))
    for start in range(first, length, _HEAD_ROWS):
        end = min(start + _HEAD_ROWS, length)
        # The token at a position is predicted by the position before it.
        logits = compute_logits(weights, hidden[start - 1 : end - 1])
        _score_rows(scores, request, torch.log_softmax(logits, -1), start)
        if scores.alternatives is not None:
            for k in range(request.alternatives):
                # Only the temperature applies: these draws are alternatives to the prompt, not continuations of it.
                settings = [replace(request.settings, top_k=-1, top_p=1.0)] * len(logits)
                uniforms = torch.from_numpy(random.random(len(logits))).to(logits.device)
                ids, logprobs = draw_tokens(logits, settings, uniforms)
                scores.alternatives.ids[start - 1 : end - 1, k] = ids.cpu().numpy()
                scores.alternatives.logprobs[start - 1 : end - 1, k] = logprobs.cpu().numpy()
    return scores


def _score_rows(scores: PromptScores, request: SampleRequest, logprobs: Tensor, start: int) -> None:
    """Fill in the scores of positions `start …` from `logprobs [n, V]`; `targets` has no row for position 0."""
    end = start + len(logprobs)
    first = max(start, request.report_start)
    if first < end:
        rows = logprobs[first - start :]
        if scores.logprobs is not None:
            tokens = torch.from_numpy(request.prompt[first:end]).to(rows.device)
            scores.logprobs[first:end] = rows.gather(1, tokens[:, None])[:, 0].cpu().numpy()
        if scores.top is not None:
            ids, values = top_tokens(rows, request.prompt_top)
            top, k = scores.top, ids.shape[1]
            top.ids[first:end, :k], top.logprobs[first:end, :k] = ids, values
    if scores.targets is not None and request.targets is not None:
        target_ids = torch.from_numpy(request.targets[start - 1 : end - 1]).to(logprobs.device)
        target_logprobs = logprobs.gather(1, target_ids.clamp(min=0))
        scores.targets[start - 1 : end - 1] = torch.where(target_ids < 0, torch.nan, target_logprobs).cpu().numpy()


def _empty_scores(request: SampleRequest) -> PromptScores:
    length = len(request.prompt)
    return PromptScores(
        logprobs=np.full(length, np.nan, np.float32) if request.prompt_logprobs else None,
        top=_empty_table(length, request.prompt_top) if request.prompt_top else None,
        targets=None if request.targets is None else np.full(request.targets.shape, np.nan, np.float32),
        alternatives=_empty_table(length - 1, request.alternatives) if request.alternatives else None,
    )


def _empty_table(rows: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(np.full((rows, k), -1, np.int32), np.full((rows, k), np.nan, np.float32))
