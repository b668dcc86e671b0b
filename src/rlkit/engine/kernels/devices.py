"""Device that computes models, and its batch sizes.

Invariant: on the CPU all activations and sums are float32 and reproducible bit for bit; on a GPU weights and
activations are bfloat16, adapters, their gradients and log-probabilities float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlkit.errors import UsageError

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one pass or decoding step."""

    rows: int  # samples of one set of weights in a decoding step
    kv_bytes: int  # memory for keys and values of all samples and of kept prefixes
    prefix_bytes: int  # the part of it that prefixes may take; 0 keeps none
    prefill_tokens: int  # prompt tokens in one pass
    train_tokens: int  # tokens in one training pass


def batch_limits(device: torch.device) -> BatchLimits:
    """Return the limits for a device: small batches for a CPU's caches, large ones to keep a GPU busy."""
    if device.type == "cpu":
        return BatchLimits(rows=128, kv_bytes=1 << 30, prefix_bytes=1 << 30, prefill_tokens=512, train_tokens=512)
    free, _ = torch.cuda.mem_get_info(device)
    return BatchLimits(rows=1024, kv_bytes=free // 3, prefix_bytes=free // 3, prefill_tokens=16_384, train_tokens=4096)


def has_gpu() -> bool:
    """Return whether torch finds a GPU, the default device of models."""
    return torch.cuda.is_available()


def select_device(name: str | None) -> torch.device:
    """Return the device called `name`; by default the GPU if torch finds one."""
    if name is None:
        return torch.device("cuda" if has_gpu() else "cpu")
    if name not in DEVICES:
        raise UsageError(f"device {name!r}: use one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda': torch finds no CUDA GPU on this machine; use 'cpu'")
    return torch.device(name)
