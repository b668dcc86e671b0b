"""Named tensors in a safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors that share no memory."""
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType] its PathLike is bare

    save_file(dict(tensors), str(path))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU."""
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType] its PathLike is bare

    return load_file(str(path))
