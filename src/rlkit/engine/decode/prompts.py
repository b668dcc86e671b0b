"""Running prompts through the model: their keys and values, the logits after them, and what is asked about them.

Invariant: what is found for a prompt does not depend on the prompts beside it, bit for bit.
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

_HEAD_ROWS = 64


@dataclass(frozen=True, slots=True, eq=False)
class PrefilledPrompt:
    """A prompt's last logits [V], and its keys and values [layers, K, P, D]."""

    logits: Tensor
    keys: Tensor
    values: Tensor
    scores: Sequence[PromptScores]


def prefill(weights: Weights, groups: Sequence[Sequence[SampleRequest]]) -> list[PrefilledPrompt]:
    """Compute the prompt of each group, whose requests all have the same one, and the scores that each wants."""
    config = weights.config
    prompts = [group[0].prompt for group in groups]
    lengths = [len(prompt) for prompt in prompts]
    tokens = pad_rows(torch.from_numpy(np.concatenate(prompts))).to(weights.embedding.device)
    like = weights.embedding
    keys = like.new_empty(config.layers, len(tokens), config.kv_heads, config.head_dim)
    values = torch.empty_like(keys)

    def keep(layer: int, layer_keys: Tensor, layer_values: Tensor) -> None:
        keys[layer], values[layer] = layer_keys, layer_values

    hidden = compute_hidden(weights, tokens, lay_out(lengths), keep=keep)
    ends = np.cumsum(lengths)
    last = logits_of(weights, hidden[torch.from_numpy(ends - 1).to(hidden.device)])
    filled: list[PrefilledPrompt] = []
    for i, (group, end, n) in enumerate(zip(groups, ends.tolist(), lengths, strict=True)):
        rows = slice(end - n, end)
        scores = [_score(weights, hidden[rows], request) for request in group]
        filled.append(PrefilledPrompt(last[i], keys[:, rows].transpose(1, 2), values[:, rows].transpose(1, 2), scores))
    return filled


def logits_of(weights: Weights, hidden: Tensor) -> Tensor:
    """Logits [n, V] float32 of `hidden [n, E]`, by weights made for sampling."""
    return matmul(pad_rows(hidden), weights.output)[: len(hidden)].float()


def top_tokens(logprobs: Tensor, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k likeliest tokens of each row of `logprobs [n, V]`, likeliest first, and their log-probabilities, [n, k]."""
    best = torch.topk(logprobs, min(k, logprobs.shape[-1]), dim=-1)
    return best.indices.to(torch.int32).cpu().numpy(), best.values.cpu().numpy()


def _score(weights: Weights, hidden: Tensor, request: SampleRequest) -> PromptScores:
    """What `request` asks about its prompt, whose hidden states are `hidden [P, E]`."""
    length, first = len(request.prompt), request.score_start
    scores = _empty(request)
    if first >= length:
        return scores
    random = np.random.Generator(np.random.Philox(key=np.array([request.seed % 2**64, 2**64 - 1], dtype=np.uint64)))
    for start in range(first, length, _HEAD_ROWS):
        end = min(start + _HEAD_ROWS, length)
        # The token at a position is predicted by the one before it.
        logits = logits_of(weights, hidden[start - 1 : end - 1])
        _score_rows(scores, request, torch.log_softmax(logits, -1), start)
        if scores.alternatives is not None:
            for k in range(request.alternatives):
                # Temperature alone shapes these draws: they are alternatives to the prompt, not continuations of it.
                settings = [replace(request.settings, top_k=-1, top_p=1.0)] * len(logits)
                uniforms = torch.from_numpy(random.random(len(logits))).to(logits.device)
                ids, logprobs = draw_tokens(logits, settings, uniforms)
                scores.alternatives.ids[start - 1 : end - 1, k] = ids.cpu().numpy()
                scores.alternatives.logprobs[start - 1 : end - 1, k] = logprobs.cpu().numpy()
    return scores


def _score_rows(scores: PromptScores, request: SampleRequest, logprobs: Tensor, start: int) -> None:
    """Fill in what `logprobs [n, V]` say about positions `start …`."""
    end = start + len(logprobs)
    begin = max(start, request.report_start)
    if begin < end:
        rows = logprobs[begin - start :]
        if scores.logprobs is not None:
            tokens = torch.from_numpy(request.prompt[begin:end]).to(rows.device)
            scores.logprobs[begin:end] = rows.gather(1, tokens[:, None])[:, 0].cpu().numpy()
        if scores.top is not None:
            ids, values = top_tokens(rows, request.prompt_top)
            scores.top.ids[begin:end, : ids.shape[1]], scores.top.logprobs[begin:end, : ids.shape[1]] = ids, values
    if scores.targets is not None and request.targets is not None:
        wanted = torch.from_numpy(request.targets[start - 1 : end - 1]).to(logprobs.device)
        found = logprobs.gather(1, wanted.clamp(min=0))
        scores.targets[start - 1 : end - 1] = torch.where(wanted < 0, torch.nan, found).cpu().numpy()


def _empty(request: SampleRequest) -> PromptScores:
    length = len(request.prompt)
    return PromptScores(
        logprobs=np.full(length, np.nan, np.float32) if request.prompt_logprobs else None,
        top=_no_tokens(length, request.prompt_top) if request.prompt_top else None,
        targets=None if request.targets is None else np.full(request.targets.shape, np.nan, np.float32),
        alternatives=_no_tokens(length - 1, request.alternatives) if request.alternatives else None,
    )


def _no_tokens(rows: int, k: int) -> TokenLogprobs:
    return TokenLogprobs(np.full((rows, k), -1, np.int32), np.full((rows, k), np.nan, np.float32))
