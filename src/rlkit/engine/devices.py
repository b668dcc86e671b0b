"""Where models are computed."""

from __future__ import annotations

import torch

from rlkit.errors import UsageError

DEVICES = ("cpu", "cuda")


def torch_device(name: str | None) -> torch.device:
    """The device called `name`; by default the GPU if there is one.

    Raises:
        UsageError: there is no such device, or none that can be used here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in DEVICES:
        raise UsageError(f"device {name!r}: use one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda': torch finds no CUDA GPU on this machine; use 'cpu'")
    return torch.device(name)
