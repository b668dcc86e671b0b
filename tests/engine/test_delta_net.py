"""Gated delta nets of Qwen3.5: their formula, and states that stay with their sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.kv_cache import KvBlock, kv_bytes
from rlkit.engine.decode.requests import SampleRequest, SampleResult, StopRule
from rlkit.engine.decode.running_batch import StepRunner
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.kernels.delta_rule import apply_delta_rule
from rlkit.engine.kernels.devices import batch_limits
from rlkit.engine.kernels.jit_cache import COMPILES
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.attention import Span, lay_out
from rlkit.engine.model.config import DeltaConfig
from rlkit.engine.model.delta_net import DeltaNet
from rlkit.engine.model.lora import Adapter, LoraSettings, make_adapter, make_sampling_weights
from rlkit.engine.model.matrices import matmul
from rlkit.engine.model.ops import multiply_by_sigmoid
from rlkit.engine.model.transformer import compute_hidden
from rlkit.engine.model.weights import Weights, load_weights
from rlkit.engine.storage.checkpoints import CheckpointInfo
from rlkit.engine.storage.peft import write_external
from rlkit.engine.training.learner import Learner
from rlkit.engine.training.losses import make_loss
from rlkit.engine.training.packing import Example

from .helpers import as_double
from .test_families import CASES, QWEN35, SIZES, VOCABULARY, make

EPS = 1e-6
TOKENS = np.random.default_rng(0).integers(2, VOCABULARY, 400)


def make_net(kernel: int = 4) -> DeltaNet:
    config = DeltaConfig(key_heads=2, value_heads=6, key_dim=12, value_dim=20, kernel=kernel, layers=frozenset({0}))
    generator = torch.Generator().manual_seed(kernel)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    decay = -random(6).sub(2).exp()  # remembers dozens of tokens
    return DeltaNet(config, random(kernel, config.channels), decay, random(6), 1 + 0.1 * random(20), EPS)


def make_rows(net: DeltaNet, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, sum(net.config.widths.values()), generator=generator)


def step_by_step(net: DeltaNet, rows: torch.Tensor) -> torch.Tensor:
    """The formula of the paper, a token at a time."""
    c, rows = net.config, rows.double()
    memory, outputs = torch.zeros(c.value_heads, c.key_dim, c.value_dim, dtype=torch.float64), []
    inputs = torch.cat([rows.new_zeros(c.kernel - 1, c.channels), rows[:, : c.channels]])
    for t, row in enumerate(rows):
        mixed = torch.nn.functional.silu((inputs[t : t + c.kernel] * net.conv.double()).sum(0))
        keys, width = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        q, k = (mixed[i * keys : (i + 1) * keys].view(c.key_heads, -1).repeat_interleave(3, 0) for i in (0, 1))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        z, b, a = row[c.channels :].split([width, c.value_heads, c.value_heads])
        memory = memory * (net.decay * torch.nn.functional.softplus(a + net.bias)).exp()[:, None, None]
        error = mixed[2 * keys :].view(c.value_heads, -1) - torch.einsum("hkv,hk->hv", memory, k)
        memory = memory + torch.einsum("hk,hv->hkv", k, error * b.sigmoid()[:, None])
        out = torch.einsum("hkv,hk->hv", memory, q) * c.key_dim**-0.5
        out = out * (out.square().mean(-1, keepdim=True) + EPS).rsqrt() * net.norm
        outputs.append(out.flatten() * torch.nn.functional.silu(z))
    return torch.stack(outputs)


@pytest.mark.parametrize("kernel", [1, 4])
@pytest.mark.parametrize("count", [1, 63, 64, 150])
def test_the_kernel_and_torch_compute_the_formula(kernel: int, count: int) -> None:
    net, spans = make_net(kernel), lay_out([count])
    rows = make_rows(net, count)
    expected = step_by_step(net, rows)
    vectors = {name: getattr(net, name).double() for name in ("conv", "decay", "bias", "norm")}
    exact = replace(net, **vectors)(rows.double(), spans)
    torch.testing.assert_close(exact, expected, rtol=1e-9, atol=1e-9)
    for actual in (net(rows, spans), net(rows.clone().requires_grad_(), spans)):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-4)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=6), st.lists(st.integers(0, 40), min_size=6, max_size=6))
@settings(deadline=None, max_examples=30)
def test_a_sequence_has_its_bits_in_parts_and_beside_others(parts: list[int], others: list[int]) -> None:
    net, count = make_net(), sum(parts)
    rows = make_rows(net, count)
    whole = net.make_state()
    expected = net(rows, lay_out([count]), [whole])
    states, outputs = [net.make_state(), net.make_state()], []
    for part, other in zip(rows.split(parts), others, strict=False):
        batch = torch.cat([make_rows(net, other), part, torch.full((3, rows.shape[1]), torch.nan)])
        outputs.append(net(batch, lay_out([other, len(part)]), states)[other : other + len(part)])
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(states[1].memory, whole.memory)
    assert torch.equal(states[1].tail, whole.tail)


def test_the_kernel_is_compiled_once_for_prompts_and_steps() -> None:
    net = make_net()
    for count in (1, 2, 70):
        net(make_rows(net, count), lay_out([count]))
        net(torch.cat([make_rows(net, count), make_rows(net, 2)]), lay_out([count, 1]))
    if COMPILES:
        assert len(apply_delta_rule.signatures) == 1


@pytest.mark.parametrize("is_trained", [False, True])
def test_continuations_start_after_their_own_prefix(is_trained: bool) -> None:
    net = make_net()
    first, second = Span(0, 70), Span(70, 9)
    spans = [first, second, Span(79, 5, first), Span(84, 66, second), Span(150, 20, first), Span(170, 30)]
    rows = make_rows(net, 203).requires_grad_(is_trained)
    with torch.set_grad_enabled(is_trained):
        packed = net(rows, spans)
    gradient = torch.zeros_like(rows)
    for span in spans:
        whole = rows[span.rows] if span.prefix is None else torch.cat([rows[span.prefix.rows], rows[span.rows]])
        alone = net(whole, lay_out([len(whole)]))
        torch.testing.assert_close(packed[span.rows], alone[span.position :], rtol=0, atol=1e-4 if is_trained else 0)
        if is_trained:  # each prefix's own outputs count once, and its state in each continuation
            (part,) = torch.autograd.grad(alone[span.position :].square().sum(), rows)
            gradient += part
    if is_trained:
        (actual,) = torch.autograd.grad(packed.square().sum(), rows)
        assert float((actual - gradient).norm()) <= 1e-4 * float(gradient.norm())


def test_the_gate_of_attention_is_a_sigmoid() -> None:
    x, gate = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)), torch.linspace(-100, 100, 350).view(7, 50)
    torch.testing.assert_close(multiply_by_sigmoid(x, gate), x * torch.sigmoid(gate), rtol=1e-6, atol=1e-30)
    assert torch.equal(multiply_by_sigmoid(x[3:4], gate[3:4]), multiply_by_sigmoid(x, gate)[3:4])


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(2)
    yield lanes
    lanes.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    family, options = CASES["qwen3.5"]
    return load_weights(make(tmp_path_factory.mktemp("m"), family, **options))


def make_random_adapter(weights: Weights, settings: LoraSettings) -> Adapter:
    adapter = make_adapter(weights.config, settings, seed=0)
    adapter.flat.add_(torch.randn(len(adapter.flat), generator=torch.Generator().manual_seed(1)) * 0.05)
    return adapter


def run(decoder: Decoder, *requests: SampleRequest, owner: str = "") -> list[SampleResult]:
    results: dict[int, SampleResult] = {}
    for i, request in enumerate(requests):
        decoder.submit(request, lambda result, i=i: results.__setitem__(i, result), owner=owner)
    while decoder.busy:
        decoder.step()
    return [results[i] for i in range(len(requests))]


def test_turns_and_forks_of_conversations_have_the_log_probabilities_of_training(
    weights: Weights, lanes: Lanes
) -> None:
    adapter = make_random_adapter(weights, LoraSettings(4))
    served = make_sampling_weights(weights, adapter.snapshot(), lanes.run)
    decoder, learner = Decoder(served, lanes), Learner(weights, adapter, lanes)
    prompts = [TOKENS[:40], TOKENS[100:103]]
    for turn in range(4):
        requests = [
            SampleRequest(prompt, 3, 10 + 30 * i, turn, DrawSettings(), StopRule(), prompt_logprobs=True)
            for i, prompt in enumerate(prompts)
        ]
        results = run(decoder, *requests)
        wholes = [
            np.append(request.prompt, sample.tokens)
            for request, result in zip(requests, results, strict=True)
            for sample in result.samples
        ]
        examples = [Example(whole[:-1], whole[1:], {}) for whole in wholes]
        trained = learner.run(examples, make_loss("cross_entropy", {}), backward=False).logprobs
        sampled = [
            np.concatenate([result.prompt_scores.logprobs[1:], sample.logprobs])
            for result in results
            if result.prompt_scores.logprobs is not None
            for sample in result.samples
        ]
        assert len(sampled) == 6
        for mine, theirs in zip(sampled, trained, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)
        # A fresh decoder gives the same bits, so nothing of earlier turns and of other rows is left.
        for request, result in zip(requests, results, strict=True):
            (fresh,) = run(Decoder(served, lanes), request)
            for mine, other in zip(result.samples, fresh.samples, strict=True):
                np.testing.assert_array_equal(mine.logprobs, other.logprobs)
        # The next turn continues one fork of each, and the last begins with the first's prompt.
        prompts = [np.concatenate([wholes[turn % 3], TOKENS[200:207]]), wholes[3 + turn % 3]]


def test_a_row_that_was_requeued_has_the_same_bits(
    weights: Weights, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued: list[int] = []
    requeue = Decoder._requeue_newest
    monkeypatch.setattr(
        Decoder, "_requeue_newest", lambda self, rows: (requeued.append(len(rows)), requeue(self, rows))
    )
    requests = [SampleRequest(TOKENS[i : 40 + 9 * i], 2, 150, i, DrawSettings(), StopRule()) for i in range(4)]
    expected = [run(Decoder(weights, lanes), request)[0] for request in requests]
    room = 3 * kv_bytes(weights.config, 128, 4)
    limits = replace(batch_limits(torch.device("cpu")), kv_bytes=room)
    decoder = Decoder(weights, lanes, limits=limits)
    for result, other in zip(run(decoder, *requests), expected, strict=True):
        for mine, theirs in zip(result.samples, other.samples, strict=True):
            np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
    assert requeued


def test_the_memory_of_a_row_includes_its_states(weights: Weights) -> None:
    states = weights.make_states()
    assert len(states) == 4  # of five layers
    block = KvBlock[int](weights.config, 32, weights.norm)
    block.append([1, 2], [torch.zeros(1, 3, 4, 16)], states)
    assert block.states[0] == states  # no third copy
    assert len({state.memory.data_ptr() for by_layer in block.states for state in by_layer}) == 8
    (chunk,) = block._chunks  # pyright: ignore[reportPrivateUsage]  the keys and values of the only layer with attention
    state_bytes = sum(state.memory.nbytes + state.tail.nbytes for state in states)
    assert kv_bytes(weights.config, 3, 4) == chunk.nbytes // 2 + state_bytes


def test_a_step_without_kernels_equals_one_with_them(weights: Weights) -> None:
    def decode(weights: Weights) -> torch.Tensor:
        block = KvBlock[int](weights.config, 64, weights.norm)
        block.append([*range(5)], [], weights.make_states())
        outputs: list[torch.Tensor] = []
        for place in range(40):
            block.start_step()
            outputs.append(StepRunner(weights, 1).run(TOKENS[place : place + 5].tolist(), [block]).clone())
        return torch.stack(outputs)

    with torch.inference_mode():
        compiled, double = decode(weights), decode(as_double(weights))
    torch.testing.assert_close(compiled, double, rtol=0, atol=1e-4 * float(double.abs().max()))


def write_published(directory: Path) -> Path:
    """A model in the form of Qwen's on the hub, which also reads images."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=SIZES | QWEN35, vision_config=vision | {"num_position_embeddings": 16})
    model = Qwen3_5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.15 - 3 * float(name.endswith("A_log"))
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("is_published", [True, False])
def test_an_exported_adapter_is_that_of_peft(is_published: bool, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    directory = tmp_path / "m"
    if is_published:
        write_published(directory)
    else:
        make(directory, "qwen3_5_text", **QWEN35)
    weights, tokens = load_weights(directory), torch.from_numpy(TOKENS[:150])
    adapter = make_random_adapter(weights, LoraSettings(4, train_unembed=False))
    (tmp_path / "adapter").mkdir()
    write_external(CheckpointInfo(str(directory), adapter.settings, steps=0), adapter)(tmp_path / "adapter")
    with torch.inference_mode():
        plain, trained = (
            torch.log_softmax(matmul(compute_hidden(weights, tokens, lay_out([150]), adapter=lora), weights.output), -1)
            for lora in (None, adapter)
        )
        kind = AutoModelForImageTextToText if is_published else AutoModelForCausalLM
        reference = kind.from_pretrained(directory, dtype=torch.float32)
        torch.testing.assert_close(plain, reference(tokens[None]).logits[0].log_softmax(-1), atol=1e-4, rtol=0)
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), tmp_path / "adapter"
        )
        torch.testing.assert_close(trained, model(tokens[None]).logits[0].log_softmax(-1), atol=1e-4, rtol=0)
    assert (plain - trained).abs().max() > 0.1
