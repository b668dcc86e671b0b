"""Quantised base weights: their numbers, and models that are trained and sampled with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch

from rlkit.engine.model.matrices import PackedMatrix, matmul, pack
from rlkit.engine.model.model_files import QUANTISATIONS, find_model, split_base_name
from rlkit.engine.model.quantisation import dequantise
from rlkit.engine.model.weights import load_weights
from rlkit.errors import UsageError
from tests.limits import HANG_S

from .helpers import ce_datum
from .test_families import MOE, QWEN35, make
from .tiny_models import write_model


def random_matrix(columns: int, inner: int) -> torch.Tensor:
    return torch.randn(columns, inner, generator=torch.Generator().manual_seed(columns)) * 0.1


def quantised(weight: torch.Tensor, quantisation: str) -> PackedMatrix:
    packed = pack(weight, quantisation)
    assert isinstance(packed, PackedMatrix)
    return packed


def test_int8_numbers_are_the_nearest_of_255_for_each_output() -> None:
    weight = random_matrix(131, 96)
    weight[7] = 0
    numbers = quantised(weight, "int8").unpack().t()
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((numbers - weight).abs() <= 0.5001 * steps).all()
    assert (numbers[7] == 0).all()


@pytest.mark.parametrize("inner", [128, 96])
def test_nf4_numbers_are_the_nearest_of_sixteen_times_the_largest_of_their_block(inner: int) -> None:
    weight = random_matrix(50, inner)
    numbers = quantised(weight, "nf4").unpack().t()
    low = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0]  # appendix E of Dettmers et al. 2023, rounded
    table = np.array([*low, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1])
    for row, exact in zip(numbers.numpy(), weight.numpy(), strict=True):
        for start in range(0, inner, 64):
            block, largest = exact[start : start + 64], np.abs(exact[start : start + 64]).max()
            errors = np.abs(row[start : start + 64] - block) / largest
            assert (errors <= np.abs(block[:, None] / largest - table).min(1) + 1e-4).all()


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@pytest.mark.parametrize(("columns", "inner"), [(131, 64), (50, 96), (24, 322)])
def test_kernels_compute_with_the_numbers_of_the_plain_formula(columns: int, inner: int, quantisation: str) -> None:
    packed = quantised(random_matrix(columns, inner), quantisation)
    numbers = packed.unpack()
    plain = dequantise(packed.panels, packed.scales).transpose(0, 1).reshape(inner, -1)[:, :columns]
    assert torch.equal(numbers, plain)
    x = random_matrix(13, inner)
    together = matmul(x, packed)
    torch.testing.assert_close(together, x @ numbers, rtol=1e-5, atol=1e-5)
    for start, count in ((0, 1), (3, 2), (12, 1)):
        assert torch.equal(matmul(x[start : start + count], packed), together[start : start + count])


def test_a_suffix_of_the_name_selects_the_quantisation(tmp_path: Path) -> None:
    assert split_base_name("owner/model@nf4") == ("owner/model", "nf4")
    assert split_base_name("owner/model") == ("owner/model", None)
    assert split_base_name("/home/me@nf5/model") == ("/home/me@nf5/model", None)
    directory = write_model(tmp_path / "m")
    (directory / "tokenizer.json").write_text("{}")
    assert find_model(f"{directory}@int8") == find_model(str(directory))


def test_quantised_weights_are_refused_on_a_gpu_and_for_odd_sizes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="need the device cpu: use the model without @nf4"):
        load_weights(write_model(tmp_path / "m"), "cuda", quantisation="nf4")
    with pytest.raises(UsageError, match="33 inputs, an odd number: use int8"):
        load_weights(write_model(tmp_path / "odd", inner=33), quantisation="nf4")


def test_a_quantised_layer_takes_less_memory(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", dtype=torch.bfloat16)
    sizes = []
    for quantisation in (None, *QUANTISATIONS):
        down = load_weights(directory, quantisation=quantisation).layers[0].down
        assert isinstance(down, PackedMatrix)
        sizes.append(down.nbytes / (len(down.panels) * down.panels.shape[2] * 128))
    assert sizes == [2, 1 + 4 / 128, 0.5 + 4 / 64]  # bytes of a number


@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_a_client_trains_saves_and_samples_a_quantised_model(client: tinker.ServiceClient, quantisation: str) -> None:
    name = f"llama@{quantisation}"
    trainer = client.create_lora_training_client(base_model=name, rank=4, seed=0).result()
    datum = ce_datum(list(b"the cat sat"))
    losses = []
    for _ in range(3):
        losses.append(trainer.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    assert losses[-1] < losses[0]
    sampler = trainer.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=8, stop=[], seed=1)
    sample = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 1, params).result().sequences[0]
    scored = trainer.forward([ce_datum([1, 2, 3, *sample.tokens])], "cross_entropy").result()
    logprobs = scored.loss_fn_outputs[0]["logprobs"].to_numpy()[-8:]
    np.testing.assert_allclose(sample.logprobs, logprobs, atol=1e-4)
    path = trainer.save_state("state").result().path
    plain = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    with (
        pytest.warns(FutureWarning, match="load_state"),
        pytest.raises(tinker.TinkerError, match="has another base model"),
    ):
        plain.load_state(path).result()


PROGRAM = """
import sys
from pathlib import Path
import numpy as np, torch
from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.requests import SampleRequest, StopRule
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import LoraSettings, make_adapter, make_sampling_weights
from rlkit.engine.model.weights import load_weights
from rlkit.engine.training.learner import Learner
from rlkit.engine.training.losses import make_loss
from rlkit.engine.training.packing import Example

lanes, rows = Lanes(1), []
for quantisation in (None, "int8", "nf4"):
    weights = load_weights(Path(sys.argv[1]), quantisation=quantisation)
    adapter = make_adapter(weights.config, LoraSettings(4), seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    learner, results = Learner(weights, adapter, lanes), []
    decoder = Decoder(make_sampling_weights(weights, adapter, lanes.run), lanes)
    for seed in range(3):
        decoder.submit(SampleRequest(np.arange(5), 2, 20, seed, DrawSettings(), StopRule()), results.append)
    while decoder.busy:
        decoder.step()
    tokens = np.concatenate([np.arange(5), results[0].samples[0].tokens]).astype(np.int64)
    example = Example(tokens[:-1], tokens[1:], {"weights": np.ones(len(tokens) - 1, np.float32)})
    logprobs = learner.run([example], make_loss("cross_entropy", {})).logprobs[0]
    np.testing.assert_allclose(logprobs[4:], results[0].samples[0].logprobs, atol=1e-4)
    rows.append([*results[0].samples[0].tokens[:4], *logprobs[:4], float(learner.gradients.norm())])
np.save(sys.argv[2], np.array(rows))
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_moe", "qwen3_5_text"])
def test_torch_gives_the_results_of_the_kernels_where_compiling_is_disabled(family: str, tmp_path: Path) -> None:
    options = {"qwen3_moe": MOE, "qwen3_5_text": QWEN35}.get(family, {"head_dim": 16})
    options = options | ({"sliding_window": 8} if family == "gemma3_text" else {})
    directory = make(tmp_path / "m", family, torch.bfloat16, **options)
    results = []
    for disabled in ("0", "1"):
        target = tmp_path / f"{disabled}.npy"
        environment = {**os.environ, "NUMBA_DISABLE_JIT": disabled}
        command = [sys.executable, "-c", PROGRAM, str(directory), str(target)]
        subprocess.run(command, env=environment, check=True, timeout=HANG_S)
        results.append(np.load(target))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)
