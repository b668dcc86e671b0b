"""Decoding steps: the compiled ones against those of torch, and among threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlkit.engine.decode.kv_cache import KvBlock
from rlkit.engine.decode.running_batch import StepRunner
from rlkit.engine.kernels import decode_step
from rlkit.engine.model.lora import make_sampling_weights
from rlkit.engine.model.rotary import AttentionKind
from rlkit.engine.model.weights import Weights, load_weights

from .helpers import as_double
from .tiny_models import VOCABULARY, write_model

ROWS, LENGTH = 12, 37  # into a second bucket


def odd_weights(directory: Path, family: str, **other: int) -> Weights:
    """A model whose layers differ: the first rotates nothing and has a bias, a window, and norms after its parts."""
    weights = load_weights(write_model(directory, family, **other))
    first, *others = weights.layers
    vector = torch.linspace(-0.5, 0.5, weights.config.hidden_size)
    kind = AttentionKind((0.0,) * (weights.config.head_dim // 2), window=11)
    odd = replace(first, attention=kind, o_bias=vector, attention_out_norm=1 + vector, mlp_out_norm=1 - vector)
    return replace(weights, layers=(odd, *others))


def decode(runner: StepRunner, weights: Weights, threads: int = 1) -> list[torch.Tensor]:
    """The logits of each step of rows that began one after the other, and so are of two lengths."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (LENGTH, ROWS)))
    no_pages: list[torch.Tensor] = []
    early, late = (KvBlock[int](weights.config, 64, weights.norm, threads) for _ in range(2))
    early.append(list(range(ROWS // 2)), no_pages)
    outputs: list[torch.Tensor] = []
    for place, row in enumerate(tokens.tolist()):
        if place == 5:
            late.append(list(range(ROWS - ROWS // 2)), no_pages)
        blocks = [block for block in (early, late) if block.rows]
        for block in blocks:
            block.start_step()
        outputs.append(runner.run(row[: sum(len(block.rows) for block in blocks)], blocks).clone())
    return outputs


class ByTorch(StepRunner):
    """Steps as they are where kernels cannot compute all layers, or none, as of float64."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights, 1)
        self._model = None


@pytest.mark.parametrize(
    ("family", "shape"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {}), ("llama", {"heads": 6, "inner": 336})],
    ids=["llama", "qwen2", "qwen3", "whole panels"],
)
def test_a_compiled_step_equals_torch(family: str, shape: dict[str, int], tmp_path: Path) -> None:
    weights = odd_weights(tmp_path / "m", family, hidden=336, **shape)
    served = make_sampling_weights(weights, None, lambda tasks: [task() for task in tasks])
    with torch.inference_mode():
        compiled, double = decode(StepRunner(served, 1), served), as_double(served)
        for others in (decode(ByTorch(served), served), decode(ByTorch(double), double)):
            for mine, theirs in zip(compiled, others, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
        # However many threads there are, and more than there are cores, every bit is the same.
        for threads in (2, 3, 7):
            runner = StepRunner(served, threads)
            assert runner._threads == threads  # pyright: ignore[reportPrivateUsage]  so wide a model takes them all
            shared = decode(runner, served, threads)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(shared, compiled, strict=True))


def test_the_other_threads_end_if_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = odd_weights(tmp_path / "m", "llama", hidden=144)
    served = make_sampling_weights(weights, None, lambda tasks: [task() for task in tasks])
    runner, whole = StepRunner(served, 3), decode_step.decode
    for failing in (0, 1, 2):

        def part(model: object, step: object, members: int, member: int, failing: int = failing) -> None:
            if member == failing:
                raise MemoryError("no room")
            whole(model, step, members, member)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(decode_step, "decode", part)
        with torch.inference_mode(), pytest.raises(MemoryError, match="no room"):
            decode(runner, served)
    monkeypatch.setattr(decode_step, "decode", whole)
    with torch.inference_mode():
        assert torch.isfinite(decode(runner, served)[-1]).all()


def test_scratch_memory_is_reused_between_steps_and_released(tmp_path: Path) -> None:
    weights = odd_weights(tmp_path / "m", "llama")
    served = make_sampling_weights(weights, None, lambda tasks: [task() for task in tasks])
    runner = StepRunner(served, 2)
    with torch.inference_mode():
        decode(runner, served)
    scratch = runner._scratch  # pyright: ignore[reportPrivateUsage]
    with torch.inference_mode():
        decode(runner, served)
    assert runner._scratch is scratch  # pyright: ignore[reportPrivateUsage]
    runner.release_memory()
    assert not runner._scratch.size  # pyright: ignore[reportPrivateUsage]
