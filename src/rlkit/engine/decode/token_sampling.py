"""Draw tokens from logits.

Invariant: a row's token depends only on its own logits, settings and uniform number, bit for bit.

A token is drawn by inverting the cumulative distribution with one uniform number: first over blocks of 64 tokens, then
inside the block, so no cumulative sum over the whole vocabulary is needed. The reported log-probability is that of the
model's distribution before temperature, top-k and top-p, as the trainer computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rlkit.engine.kernels import cpu_kernels
from rlkit.engine.kernels.threads import parallel_for
from rlkit.engine.model.ops import has_kernels

# At this temperature only the likeliest token is drawn; much smaller numbers do not exist in float32.
_LOWEST_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Sampling parameters: temperature 0 selects the likeliest token; `top_k` < 1 and `top_p` ≥ 1 keep all tokens."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    @property
    def is_filtering(self) -> bool:
        """True if top-k or top-p excludes tokens."""
        return self.top_k >= 1 or self.top_p < 1.0


def draw_tokens(
    logits: Tensor, settings: Sequence[DrawSettings], uniforms: Tensor, *, threads: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draw a token for each row.

    Args:
        logits: [n, V] float32.
        uniforms: [n] float64 in [0, 1).

    Returns:
        tokens [n] int64 and log-probabilities [n] float32.
    """
    tokens, normalisers = _sample(logits, uniforms, threads)
    if any(s.temperature not in (0.0, 1.0) or s.is_filtering for s in settings):
        tokens, _ = _sample(_apply_settings(logits, settings), uniforms, threads)
    greedy = [s.temperature == 0 for s in settings]
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logits.device), logits.argmax(-1), tokens)
    return tokens, (logits.gather(1, tokens[:, None])[:, 0] - normalisers).to(torch.float32)


def _apply_settings(logits: Tensor, settings: Sequence[DrawSettings]) -> Tensor:
    """Divide `logits [n, V]` by the temperatures, with −∞ for tokens that a row's settings exclude."""
    temperatures = logits.new_tensor([max(s.temperature, _LOWEST_TEMPERATURE) for s in settings])
    logits_by_temperature = (logits - logits.amax(-1, keepdim=True)) / temperatures[:, None]
    for row, s in enumerate(settings):
        if s.is_filtering and s.temperature > 0:
            logits_by_temperature[row] = _exclude_tokens(logits_by_temperature[row], s)
    return logits_by_temperature


def _sample(logits: Tensor, uniforms: Tensor, threads: int | None) -> tuple[Tensor, Tensor]:
    """Draw a token [n] for each row of `logits [n, V]`; also return the log of its summed exponentials, [n] float64."""
    if has_kernels(logits):
        tokens = torch.empty(len(logits), dtype=torch.int64)
        normalisers = torch.empty(len(logits), dtype=torch.float64)
        numbers, targets, ids, sums = logits.contiguous().numpy(), uniforms.numpy(), tokens.numpy(), normalisers.numpy()

        def part(a: int, b: int) -> None:
            cpu_kernels.draw_tokens(numbers[a:b], targets[a:b], ids[a:b], sums[a:b])

        parallel_for(part, len(logits), min_per_thread=4, threads=threads)
        return tokens, normalisers
    peak = logits.amax(-1, keepdim=True)
    sums, blocks = _block_sums(torch.exp(logits - peak))
    normalisers = peak[:, 0].double() + sums.sum(-1).log()
    # Weights that are not finite define no distribution, but the result must still be a token of the vocabulary.
    return _invert(sums, blocks, uniforms).clamp_(max=logits.shape[1] - 1), normalisers


def _block_sums(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums [n, blocks] float64 of `weights [n, V]`, and the weights as [n, blocks, 64]."""
    padding = -weights.shape[1] % cpu_kernels.BLOCK
    padded = functional.pad(weights, (0, padding)) if padding else weights  # an empty padding would copy
    blocks = padded.view(len(weights), -1, cpu_kernels.BLOCK)
    return blocks.sum(-1).double(), blocks


def _invert(sums: Tensor, blocks: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token at which the cumulative weight exceeds `uniforms` · total; never a token of weight 0."""
    cumulative = sums.cumsum(-1)
    target = uniforms * cumulative[:, -1]
    block = _first_above(cumulative, target, sums)
    rows = torch.arange(len(sums), device=sums.device)
    inside = blocks[rows, block].double()
    remainder = target - (cumulative[rows, block] - sums[rows, block])
    return block * cpu_kernels.BLOCK + _first_above(inside.cumsum(-1), remainder, inside)


def _first_above(cumulative: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Return the first index whose cumulative weight exceeds `target`, or the last index of positive weight."""
    index = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    width = weights.shape[1]
    last = width - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1)
    return torch.minimum(index, last)


def _exclude_tokens(logits: Tensor, settings: DrawSettings) -> Tensor:
    """Return `logits [V]` with −∞ for tokens that top-k and then top-p (Holtzman et al. 2020) exclude."""
    ranked, order = logits.sort(descending=True, stable=True)
    count = len(ranked)
    if settings.top_k >= 1:
        count = min(count, settings.top_k)
    if settings.top_p < 1.0:
        cumulative = torch.softmax(ranked[:count].double(), 0).cumsum(0)
        count = int((cumulative < settings.top_p).sum()) + 1
    result = torch.full_like(logits, -torch.inf)
    result[order[:count]] = ranked[:count]
    return result
