"""Every model family and rotary scaling against transformers' own class for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch

from rlkit.engine import EngineServer
from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.requests import SampleRequest, SampleResult, StopRule
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.attention import lay_out
from rlkit.engine.model.lora import Adapter, LoraSettings, make_adapter, make_sampling_weights
from rlkit.engine.model.matrices import matmul
from rlkit.engine.model.transformer import compute_hidden
from rlkit.engine.model.weights import Weights, load_weights
from rlkit.engine.storage.checkpoints import CheckpointInfo
from rlkit.engine.storage.peft import write_external
from rlkit.engine.training.learner import Learner
from rlkit.engine.training.losses import make_loss
from rlkit.engine.training.packing import Example
from rlkit.errors import UsageError
from rlkit.testing import byte_model

from .conftest import connect
from .helpers import ce_datum
from .tiny_models import LLAMA3

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA = {"num_hidden_layers": 7, "head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 24}
MOE = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
QWEN35 = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3-untied": (
        "gemma3_text",
        {**GEMMA, "tie_word_embeddings": False, "layer_types": [FULL, SLIDING] * 3 + [FULL]},
    ),
    "gemma3-linear": (
        "gemma3_text",
        {
            **GEMMA,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-odd-head-width": ("llama", {"head_dim": 22}),
    "llama-one-head-each": ("llama", {"num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral-window": ("mistral", {"sliding_window": 33}),
    "mistral-window-as-long-as-the-context": ("mistral", {"sliding_window": 512}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 100}),
    "phi3-tied": ("phi3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": [SLIDING, FULL] * 2 + [FULL]},
    ),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-attention-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-moe": ("qwen3_moe", MOE),
    "qwen3-moe-in-some-layers": (
        "qwen3_moe",
        {**MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True},
    ),
    "qwen3-moe-bias-and-window": (
        "qwen3_moe",
        {**MOE, "num_experts_per_tok": 6, "attention_bias": True, "use_sliding_window": True, "sliding_window": 30},
    ),
    "qwen3.5": ("qwen3_5_text", QWEN35),
    "qwen3.5-tied-bias-and-yarn": (
        "qwen3_5_text",
        {
            **QWEN35,
            "layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR],
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 50}),
    "smollm3-untied": ("smollm3", {"tie_word_embeddings": False, "no_rope_layers": [0, 1, 1, 0, 0]}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 900.0}}),
    "llama3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}}),
    "yarn": ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e6}, "head_dim": 32}),
    "yarn-by-the-contexts": ("qwen2", {"rope_parameters": {**YARN, "factor": None, "rope_theta": 1e4}}),
    "yarn-in-detail": (
        "llama",
        {
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e4,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.3,
                "truncate": False,
            }
        },
    ),
    "yarn-with-its-own-amplitude": (
        "llama",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": 1.3}},
    ),
}


TRAINED = ["gemma3", "mistral-window", "qwen3-moe", "qwen3.5"]


def make(directory: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "1GB", **options: Any) -> Path:
    """A random model of `family`, saved by transformers; every bias and norm is random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | options), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        is_stored_less_one = family in ("gemma3_text", "qwen3_5_text") and "linear_attn.norm" not in name
        parameter.data = torch.randn_like(parameter) * 0.15 + float("norm" in name and not is_stored_less_one)
        if name.endswith("A_log"):
            parameter.data -= 3  # remember dozens of tokens
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return directory


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(2)
    yield lanes
    lanes.close()


def log_probabilities(directory: Path, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The engine's."""
    weights = load_weights(directory)
    with torch.inference_mode():
        return torch.log_softmax(matmul(compute_hidden(weights, tokens, lay_out(lengths)), weights.output), -1)


def assert_equal_to_transformers(directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    lengths = [3, 150, 17]
    tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    actual = log_probabilities(directory, tokens, lengths)
    with torch.inference_mode():
        for part, logprobs in zip(tokens.split(lengths), actual.split(lengths), strict=True):
            expected = torch.log_softmax(reference(part[None]).logits[0], -1)
            torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    assert_equal_to_transformers(make(tmp_path, family, **options))


def sample(weights: Weights, adapter: Adapter | None, lanes: Lanes, *requests: SampleRequest) -> list[SampleResult]:
    results: list[SampleResult] = []
    decoder = Decoder(make_sampling_weights(weights, adapter, lanes.run), lanes)
    for request in requests:  # one after the other, so that later ones find the prefixes of earlier ones
        decoder.submit(request, results.append)
        while decoder.busy:
            decoder.step()
    return results


@pytest.mark.parametrize("quantisation", [None, "int8", "nf4"])
@pytest.mark.parametrize("case", TRAINED)
def test_samples_beyond_a_window_have_the_log_probabilities_of_training(
    case: str, quantisation: str | None, tmp_path: Path, lanes: Lanes
) -> None:
    family, options = CASES[case]
    weights = load_weights(make(tmp_path, family, **options), quantisation=quantisation)
    adapter = make_adapter(weights.config, LoraSettings(4), seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    prompt = np.random.default_rng(0).integers(2, VOCABULARY, 70)
    request = SampleRequest(prompt, 2, 60, 0, DrawSettings(), StopRule(), prompt_logprobs=True)
    (result,) = sample(weights, adapter.snapshot(), lanes, request)
    assert result.prompt_scores.logprobs is not None
    examples = [Example(whole[:-1], whole[1:], {}) for whole in (np.append(prompt, s.tokens) for s in result.samples)]
    trained = Learner(weights, adapter, lanes).run(examples, make_loss("cross_entropy", {}), backward=False).logprobs
    for drawn, logprobs in zip(result.samples, trained, strict=True):
        np.testing.assert_allclose(result.prompt_scores.logprobs[1:], logprobs[:69], atol=2e-4)
        np.testing.assert_allclose(drawn.logprobs, logprobs[69:], atol=2e-4)


@pytest.mark.parametrize("case", TRAINED)
def test_a_sample_of_these_families_does_not_depend_on_others_or_on_prefixes(
    case: str, tmp_path: Path, lanes: Lanes
) -> None:
    family, options = CASES[case]
    weights = load_weights(make(tmp_path, family, **options))
    prompt = np.random.default_rng(0).integers(2, VOCABULARY, 130)
    rule, settings = StopRule(), DrawSettings()
    request = SampleRequest(prompt, 1, 60, 0, settings, rule)
    (alone,) = sample(weights, None, lanes, request)
    others = [SampleRequest(prompt[:n], n % 5 + 1, 20, n, settings, rule) for n in (3, 66, 129)]
    *_, after = sample(weights, None, lanes, *others, request)
    results: list[SampleResult] = []
    decoder = Decoder(weights, lanes)
    for one in (*others, request):
        decoder.submit(one, results.append)
    while decoder.busy:
        decoder.step()
    for result in (after, results[-1]):
        np.testing.assert_array_equal(alone.samples[0].tokens, result.samples[0].tokens)
        np.testing.assert_array_equal(alone.samples[0].logprobs, result.samples[0].logprobs)


@pytest.mark.parametrize("case", TRAINED)
def test_a_client_trains_saves_resumes_and_exports_a_model(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    directory = make(tmp_path / "m", family, **options)
    engine = EngineServer(root=tmp_path / "root", resolve=lambda _: directory, device="cpu")
    with engine as server, connect(server) as client:
        trainer = client.create_lora_training_client(base_model="m", rank=4, seed=0).result()
        losses = train(trainer, 3)
        assert losses[-1] < losses[0]
        path = trainer.save_state("state").result().path
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        assert train(trainer, 2) == train(resumed, 2)
        attention = client.create_lora_training_client(base_model="m", rank=4, train_mlp=False).result()
        attention.save_weights_external("attention").result()
        trainer.save_weights_external("all").result()
        mlp = client.create_lora_training_client(
            base_model="m", rank=4, train_attn=False, train_unembed=False, seed=0
        ).result()
        assert train(mlp, 2)[1] < losses[0]


@pytest.mark.parametrize("dense_layers", [[], [1]])
def test_experts_merged_by_the_cookbook_have_the_log_probabilities_of_training(
    dense_layers: list[int], tmp_path: Path, lanes: Lanes
) -> None:
    from tinker_cookbook.weights import build_hf_model
    from transformers import AutoModelForCausalLM

    directory = byte_model(tmp_path / "m")  # the cookbook needs a tokenizer
    make(directory, "qwen3_moe", **MOE | {"mlp_only_layers": dense_layers, "vocab_size": 259})
    weights = load_weights(directory)
    adapter = make_adapter(weights.config, LoraSettings(4, train_unembed=False), seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    info = CheckpointInfo(str(directory), adapter.settings, steps=0)
    (tmp_path / "adapter").mkdir()
    write_external(info, adapter)(tmp_path / "adapter")
    merged = tmp_path / "merged"
    build_hf_model(base_model=str(directory), adapter_path=str(tmp_path / "adapter"), output_path=str(merged))
    tokens = torch.randint(0, VOCABULARY, (150,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        hidden = compute_hidden(weights, tokens, lay_out([150]), adapter=adapter)
        actual = torch.log_softmax(matmul(hidden, weights.output), -1)
        model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
        torch.testing.assert_close(actual, model(tokens[None]).logits[0].log_softmax(-1), atol=1e-4, rtol=0)
    assert (actual - log_probabilities(directory, tokens, [150])).abs().max() > 0.1


def train(trainer: tinker.TrainingClient, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        future = trainer.forward_backward([ce_datum(list(range(2, 60)))], "cross_entropy")
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        losses.append(future.result().metrics["loss:sum"])
    return losses


def test_a_checkpoint_in_shards_is_read_by_its_index(tmp_path: Path) -> None:
    make(tmp_path, "llama", shard="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    (tmp_path / "consolidated.safetensors").write_bytes(b"the same weights in another form")
    assert_equal_to_transformers(tmp_path)


def test_a_bfloat16_checkpoint_is_computed_in_float32(tmp_path: Path) -> None:
    assert_equal_to_transformers(make(tmp_path, "qwen2", torch.bfloat16))


def test_a_scaled_rotation_changes_the_numbers(tmp_path: Path) -> None:
    tokens = torch.arange(60)
    numbers = [log_probabilities(make(tmp_path / "plain", "llama"), tokens, [60])]
    for name in ("linear", "llama3", "yarn-in-detail", "yarn-with-its-own-amplitude"):
        options = CASES[name][1]
        theta = {"rope_parameters": {**options["rope_parameters"], "rope_theta": 10_000.0}}
        numbers.append(log_probabilities(make(tmp_path / name, "llama", **theta), tokens, [60]))
    for i, some in enumerate(numbers):
        assert all((some - other).abs().max() > 1e-2 for other in numbers[:i])


def break_missing(directory: Path) -> str:
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.unlink()
    return shard.name


def break_truncated(directory: Path) -> str:
    shard = sorted(directory.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    return shard.name


def break_corrupt(directory: Path) -> str:
    shard = sorted(directory.glob("model-*.safetensors"))[0]
    shard.write_bytes(b"\xff" * 100 + shard.read_bytes()[100:])
    return shard.name


def break_index(directory: Path) -> str:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../elsewhere.safetensors"}}')
    return "weight_map"


def break_tensor(directory: Path) -> str:
    from safetensors.torch import load_file, save_file

    for shard in directory.glob("model-*.safetensors"):
        tensors = load_file(shard)
        save_file({name: t for name, t in tensors.items() if "layers.1.mlp.up" not in name}, shard)
    return "model.layers.1.mlp.up_proj.weight"


def break_dtype(directory: Path) -> str:
    from safetensors.torch import load_file, save_file

    for shard in directory.glob("model-*.safetensors"):
        save_file({name: t.to(torch.float8_e4m3fn) for name, t in load_file(shard).items()}, shard)
    return "float8_e4m3fn"


@pytest.mark.parametrize(
    "spoil", [break_missing, break_truncated, break_corrupt, break_index, break_tensor, break_dtype]
)
def test_non_finite_weights_are_a_one_line_error_that_names_them(spoil: Callable[[Path], str], tmp_path: Path) -> None:
    named = spoil(make(tmp_path, "llama", shard="100KB"))
    with pytest.raises(UsageError) as caught:
        load_weights(tmp_path)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
