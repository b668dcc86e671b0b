"""Prefill: run prompts through the model, for their keys and values, next-token logits, and scores.

Invariant: in float32 on the CPU, a prompt's results depend neither on other prompts in the pass nor on the part of it
that was kept from an earlier pass, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlkit.engine.decode.prefixes import PAGE_TOKENS, Prefix
from rlkit.engine.decode.requests import PromptScores, SampleRequest, TokenLogprobs
from rlkit.engine.decode.token_sampling import draw_tokens
from rlkit.engine.model.attention import Span, lay_out
from rlkit.engine.model.delta_net import DeltaState
from rlkit.engine.model.matrices import matmul
from rlkit.engine.model.ops import pad_rows
from rlkit.engine.model.transformer import compute_hidden
from rlkit.engine.model.weights import Weights

_HEAD_ROWS = 64  # positions per product with the output layer; bounds the memory of logits [n, V]


@dataclass(frozen=True, slots=True, eq=False)
class PrefilledPrompt:
    """Results of a prompt that several requests have in common."""

    logits: Tensor  # [V], after the last token
    pages: Sequence[Tensor]  # of keys and values, [layers, ·, 2K, D]
    states: Sequence[DeltaState]  # after the last token
    kept_states: Mapping[int, Sequence[DeltaState]]  # by the number of pages before them
    scores: Sequence[PromptScores]  # of each request


@torch.inference_mode()
def prefill(
    weights: Weights, groups: Sequence[Sequence[SampleRequest]], prefixes: Sequence[Prefix]
) -> list[PrefilledPrompt]:
    """Run the common prompt of each group of requests, and compute the scores that each request needs.

    Args:
        prefixes: for each group, the kept part of the prompt, before `reusable_length`.
    """
    config, template = weights.config, weights.norm
    starts = [PAGE_TOKENS * len(prefix.pages) for prefix in prefixes]
    new_tokens = [group[0].prompt[start:] for group, start in zip(groups, starts, strict=True)]
    lengths = [len(part) for part in new_tokens]
    tokens = pad_rows(torch.from_numpy(np.concatenate(new_tokens))).to(template.device)
    sizes = [[min(PAGE_TOKENS, n - first) for first in range(0, n, PAGE_TOKENS)] for n in lengths]
    page_spans = lay_out([*chain.from_iterable(sizes)])
    shape = config.kv_layers, 2 * config.kv_heads, config.head_dim
    new_pages = [[template.new_empty(shape[0], size, *shape[1:]) for size in part] for part in sizes]

    def store_kv(layer: int, kv: Tensor) -> None:
        for page, span in zip(chain.from_iterable(new_pages), page_spans, strict=True):
            page[layer] = kv[span.rows]

    kept_kv = template.new_empty(sum(starts), *shape[1:])  # of one layer at a time

    def load_kv(layer: int) -> Tensor:
        pages = [page[layer] for prefix in prefixes for page in prefix.pages]
        return torch.cat(pages, out=kept_kv) if pages else kept_kv

    places = [_find_state_places(prefix, n) for prefix, n in zip(prefixes, lengths, strict=True)]
    states = [_make_states(weights, prefix, len(part)) for prefix, part in zip(prefixes, places, strict=True)]
    hidden = compute_hidden(
        weights,
        tokens,
        lay_out(lengths, starts),
        store_kv=store_kv,
        load_kv=load_kv,
        states=[*chain.from_iterable(states)],
        state_spans=_split_spans(lengths, starts, places),
    )
    ends = np.cumsum(lengths)
    last = compute_logits(weights, hidden[torch.from_numpy(ends - 1).to(hidden.device)])
    results: list[PrefilledPrompt] = []
    for i, (group, end, n) in enumerate(zip(groups, ends.tolist(), lengths, strict=True)):
        rows = slice(end - n, end)
        scores = [_score_prompt(weights, hidden[rows], request) for request in group]
        pages = [*prefixes[i].pages, *new_pages[i]]
        between = zip(places[i], states[i], strict=False)  # the last states are after the prompt, at no place
        kept_states = {len(prefixes[i].pages): prefixes[i].states, **dict(between)}
        results.append(PrefilledPrompt(last[i], pages, states[i][-1], kept_states, scores))
    return results


def _find_state_places(prefix: Prefix, new_tokens: int) -> list[int]:
    """Return the numbers of pages of a prompt after which its states are kept, in order; a token follows each."""
    last = len(prefix.pages) + (new_tokens - 1) // PAGE_TOKENS
    return sorted(place for place in prefix.state_places if place <= last)


def _make_states(weights: Weights, prefix: Prefix, places: int) -> list[list[DeltaState]]:
    """Return the states to compute with, which become those after each of `places`, and after the prompt."""
    first = [state.copy() for state in prefix.states] or weights.make_states()
    return [first, *(weights.make_states() for _ in range(places))]


def _split_spans(lengths: Sequence[int], starts: Sequence[int], places: Sequence[Sequence[int]]) -> list[Span]:
    """Return the spans of the parts of prompts between the places of their states, each after the part before it."""
    spans: list[Span] = []
    offset = 0
    for length, start, pages in zip(lengths, starts, places, strict=True):
        edges = [0, *(PAGE_TOKENS * place - start for place in pages), length]
        part = None
        for first, end in pairwise(edges):
            part = Span(offset + first, end - first, part)
            spans.append(part)
        offset += length
    return spans


def reusable_length(requests: Sequence[SampleRequest]) -> int:
    """Return the positions of a common prompt whose hidden states none of the requests needs."""
    return min(request.score_start for request in requests) - 1


def compute_logits(weights: Weights, hidden: Tensor) -> Tensor:
    """Return logits [n, V] float32 of `hidden [n, E]`; `weights` come from `make_sampling_weights`."""
    return matmul(pad_rows(hidden), weights.output)[: len(hidden)].float()


def top_tokens(logprobs: Tensor, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return ids and log-probabilities, [n, min(k, V)], of the likeliest tokens in each row of `logprobs`, in order."""
    top = torch.topk(logprobs, min(k, logprobs.shape[-1]), dim=-1)
    return top.indices.to(torch.int32).cpu().numpy(), top.values.cpu().numpy()


def _score_prompt(weights: Weights, hidden: Tensor, request: SampleRequest) -> PromptScores:
    """Return the scores of the prompt of `request`, whose last hidden states are `hidden [n, E]`."""
    offset = len(request.prompt) - len(hidden) + 1
    length, first = len(request.prompt), request.score_start
    scores = _empty_scores(request)
    if first >= length:
        return scores
    key = np.array([request.seed % 2**64, 2**64 - 1], dtype=np.uint64)  # the second word of a sample's key is 0
    random = np.random.Generator(np.random.Philox(key=key))
    for start in range(first, length, _HEAD_ROWS):
        end = min(start + _HEAD_ROWS, length)
        # The token at a position is predicted by the position before it.
        logits = compute_logits(weights, hidden[start - offset : end - offset])
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
