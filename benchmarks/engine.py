"""Compare the embedded engine with transformers and peft on the same work in the same run.

    uv run python benchmarks/engine.py
    uv run python benchmarks/engine.py --model qwen3-0.6b --rounds 1     (random weights of that shape)
    uv run python benchmarks/engine.py --streams --base-weights own int8 nf4

Work, on the default model with LoRA adapters of rank 32:

    sample     64 sequences of 64 tokens after 64 different prompts of 13 tokens      against `generate`, adapter merged
    groups     16 prompts, 8 samples of 5 tokens each                                 against `generate`, adapter merged
    train      forward and backward of 64 sequences, 5,000 tokens of 20 to 136        against a padded step of peft
    train/g    the same for 6 groups of 8 with a common prompt: 80 tokens, then 20    against a padded step of peft
    streams    1, 8 and 64 sequences after prompts of 13 tokens; time from the second token on      with `--streams`

With `--streams` only the streams run, for each of `--base-weights` (the model's own, int8, nf4), with an adapter and
without, and with `--peer llama.cpp` a server of llama.cpp with the model in float16, `--gguf FILE`. It is the package
xllamacpp (`uv run --with xllamacpp python benchmarks/engine.py …`) or the `llama-server` of `--llama-server` or PATH.

`http` is `groups` through a server and the tinker SDK, compared with direct calls to the engine, and the round-trip
time of a request that computes nothing.

The contenders run in turn, each in a separate process, and do each work twice. The better time counts, because a
process gets new memory slowly on some virtual machines. `limit` is the time of the work's floating-point operations at
the speed of a large matrix product, measured in the same rounds. It counts a common prompt once, and no backward pass
of the output layer for positions without a gradient. On a GPU (`--device cuda`, the default if there is one) both sides
compute in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from shapes import model_directory

RANK = 32
PROMPT, SEQUENCES, NEW = 13, 64, 64
GROUPS, GROUP_SIZE, GROUP_NEW = 16, 8, 5
TRAIN_GROUPS, SHARED, OWN = 6, 80, 20
PEER_MICRO_BATCH = 8
CONTENDERS = ("limit", "engine", "http", "peer")
ROUND_TRIPS = 50
WORK = ("sample", "groups", "train", "train/g")


def prompts(count: int, length: int, vocab: int) -> list[np.ndarray]:
    """Return random prompts, the same for every contender."""
    rng = np.random.default_rng(0)
    return [rng.integers(10, vocab - 10, length) for _ in range(count)]


def training_sequences(vocab: int) -> list[np.ndarray]:
    """Return 64 sequences of 20 to 136 tokens, 5,000 in total."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(20, 137, SEQUENCES)
    lengths[-1] += 5000 - lengths.sum() if 20 <= lengths[-1] + 5000 - lengths.sum() <= 136 else 0
    return [rng.integers(10, vocab - 10, n) for n in lengths]


def training_groups(vocab: int) -> list[np.ndarray]:
    """Return 6 groups of 8 sequences with a common prompt."""
    rng = np.random.default_rng(2)
    shared = [rng.integers(10, vocab - 10, SHARED) for _ in range(TRAIN_GROUPS)]
    return [np.concatenate([p, rng.integers(10, vocab - 10, OWN)]) for p in shared for _ in range(GROUP_SIZE)]


def timed(work: Callable[[], object], device: str) -> float:
    """Return the seconds that `work` takes."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def best(work: Callable[[], object], device: str) -> float:
    """Return the shorter of two durations of `work` in seconds."""
    return min(timed(work, device) for _ in range(2))


def limit(directory: Path, device: str) -> dict[str, float]:
    """Measure operations per second of a large matrix product, and bytes per second of a large read."""
    import torch

    size, dtype = (2048, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    a = torch.randn(size, size, dtype=dtype, device=device)
    b = torch.randn(size, size, dtype=dtype, device=device)
    large = torch.ones(1 << (27 if device == "cpu" else 31), device=device, dtype=torch.float32)
    return {
        "flops": 2 * size**3 / min(timed(lambda: a @ b, device) for _ in range(10)),
        "bytes": large.numel() * 4 / min(timed(large.sum, device) for _ in range(5)),
        "memory": 0.0,
    }


def engine(directory: Path, device: str) -> dict[str, float]:
    """Measure the engine without HTTP."""
    from rlkit.engine.decode.decoder import Decoder
    from rlkit.engine.decode.requests import SampleRequest, StopRule
    from rlkit.engine.decode.token_sampling import DrawSettings
    from rlkit.engine.kernels.threads import Lanes
    from rlkit.engine.model.lora import LoraSettings, make_adapter, make_sampling_weights
    from rlkit.engine.model.weights import load_weights
    from rlkit.engine.training.learner import Learner
    from rlkit.engine.training.losses import make_loss
    from rlkit.engine.training.packing import Example

    lanes = Lanes(None if device == "cpu" else 1)
    weights = load_weights(directory, device)
    vocab = weights.config.vocab_size
    adapter = make_adapter(weights.config, LoraSettings(RANK, train_unembed=False), seed=0)
    learner = Learner(weights, adapter, lanes)
    served = make_sampling_weights(weights, learner.adapter, lanes.run)

    def sample(count: int, samples: int, new: int) -> None:
        decoder = Decoder(served, lanes)
        for seed, prompt in enumerate(prompts(count, PROMPT, vocab)):
            request = SampleRequest(prompt, samples, new, seed, DrawSettings(), StopRule())
            decoder.submit(request, lambda _: None)
        while decoder.busy:
            decoder.step()

    def train(sequences: list[np.ndarray], answer: int | None) -> None:
        examples: list[Example] = []
        for tokens in sequences:
            advantages = np.ones(len(tokens), np.float32)
            if answer is not None:
                advantages[:-answer] = 0
            inputs = {"advantages": advantages, "logprobs": np.full(len(tokens), -11, np.float32)}
            examples.append(Example(tokens, np.append(tokens[1:], 0), inputs))
        learner.run(examples, make_loss("importance_sampling", {}))

    sample(4, 1, 2)
    train(training_sequences(vocab)[:4], None)
    return {
        "sample": best(lambda: sample(SEQUENCES, 1, NEW), device),
        "groups": best(lambda: sample(GROUPS, GROUP_SIZE, GROUP_NEW), device),
        "train": best(lambda: train(training_sequences(vocab), None), device),
        "train/g": best(lambda: train(training_groups(vocab), OWN), device),
        "memory": _peak(device),
    }


def http(directory: Path, device: str) -> dict[str, float]:
    """Measure the engine as a server."""
    import tinker
    from tinker import types

    from rlkit.engine import EngineServer
    from rlkit.engine.model.config import read_config

    os.environ["TINKER_TELEMETRY"] = "0"
    vocab, name = read_config(directory).vocab_size, str(directory)
    params = types.SamplingParams(max_tokens=GROUP_NEW, stop=[])
    inputs = [tinker.ModelInput.from_ints(list(map(int, p))) for p in prompts(GROUPS, PROMPT, vocab)]
    root = Path(tempfile.mkdtemp())
    with (
        EngineServer(root=root, resolve=lambda _: directory, models=[name], device=device) as server,
        tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as client,
    ):
        trainer = client.create_lora_training_client(name, rank=RANK, train_unembed=False, seed=0).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()

        def sample(inputs: list[tinker.ModelInput]) -> None:
            for future in [sampler.sample(prompt, GROUP_SIZE, params) for prompt in inputs]:
                future.result()

        sample(inputs[:1])
        rest = tinker.RestClient(base_url=server.url, api_key=server.api_key)
        trips = [timed(lambda: rest.get_server_capabilities().result(), device) for _ in range(ROUND_TRIPS)]
        return {
            "groups": best(lambda: sample(inputs), device),
            "trip": float(np.median(trips)),
            "memory": _peak(device),
        }


def peer(directory: Path, device: str) -> dict[str, float]:
    """Measure `generate` of the plain model, as fast as one with a merged adapter, and a padded step of peft."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    vocab = model.config.vocab_size

    def sample(count: int, samples: int, new: int) -> None:
        tokens = torch.tensor(np.stack(prompts(count, PROMPT, vocab)), device=device)
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=new,
                min_new_tokens=new,
                num_return_sequences=samples,
                pad_token_id=0,
            )

    sample(4, 1, 2)
    timings = {
        "sample": best(lambda: sample(SEQUENCES, 1, NEW), device),
        "groups": best(lambda: sample(GROUPS, GROUP_SIZE, GROUP_NEW), device),
    }
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    trained = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=names)).train()

    def train(sequences: list[np.ndarray], answer: int | None) -> None:
        ordered = sorted(sequences, key=len)
        for start in range(0, len(ordered), PEER_MICRO_BATCH):
            batch = ordered[start : start + PEER_MICRO_BATCH]
            longest = max(map(len, batch))
            tokens = torch.tensor(np.stack([np.pad(s, (0, longest - len(s))) for s in batch]), device=device)
            mask = torch.arange(longest, device=device) < torch.tensor([len(s) for s in batch], device=device)[:, None]
            logits = trained(input_ids=tokens, attention_mask=mask.long()).logits.float()
            logprobs = torch.log_softmax(logits[:, :-1], -1).gather(2, tokens[:, 1:, None])[..., 0]
            counted = mask[:, 1:].clone()
            if answer is not None:
                counted[:, : longest - answer - 1] = False
            (-(torch.exp(logprobs + 11)) * counted).sum().backward()

    train(training_sequences(vocab)[:4], None)
    timings["train"] = best(lambda: train(training_sequences(vocab), None), device)
    timings["train/g"] = best(lambda: train(training_groups(vocab), OWN), device)
    return {**timings, "memory": _peak(device)}


def measure_streams(options: argparse.Namespace) -> None:
    """Print tokens per second of 1, 8 and 64 streams, of training, and the peak memory, in turns."""
    directory = model_directory(options.model, options.scratch)
    script = str(Path(__file__).with_name("streams.py"))
    contenders = [[script, "engine", str(directory), weights] for weights in options.base_weights]
    if options.peer == "llama.cpp":
        contenders.append([script, "llama.cpp", str(options.gguf), options.llama_server or ""])
    for turn in range(options.rounds):
        for contender in contenders:
            done = subprocess.run([sys.executable, *contender], stdout=subprocess.PIPE, check=True, text=True)
            print(f"round {turn + 1}, {directory.name}, {contender[1]} {contender[3]}: {done.stdout.splitlines()[-1]}")


def _peak(device: str) -> float:
    """Return the peak memory of this process in GB, of the machine or of the GPU."""
    import torch

    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def operations(directory: Path) -> dict[str, float]:
    """Return the floating-point operations of each work."""
    from rlkit.engine.model.config import read_config

    c = read_config(directory)
    layer = c.hidden_size * ((c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.intermediate_size)
    body = 2.0 * c.layers * (layer + c.heads * c.head_dim * c.hidden_size)
    head = 2.0 * c.hidden_size * c.vocab_size
    tokens = sum(map(len, training_sequences(c.vocab_size)))
    rows = TRAIN_GROUPS * (SHARED + GROUP_SIZE * OWN)
    return {
        # A prompt's last position and every sampled token but the last go through the output layer.
        "sample": SEQUENCES * ((PROMPT + NEW - 1) * body + NEW * head),
        "groups": GROUPS * (PROMPT * body + head) + GROUPS * GROUP_SIZE * (GROUP_NEW - 1) * (body + head),
        "train": tokens * 2 * (body + head),
        "train/g": rows * (2 * body + head) + TRAIN_GROUPS * GROUP_SIZE * OWN * head,
    }


def units(directory: Path) -> dict[str, int]:
    """Return the number of sampled or trained tokens of each work."""
    from rlkit.engine.model.config import read_config

    vocab = read_config(directory).vocab_size
    return {
        "sample": SEQUENCES * NEW,
        "groups": GROUPS * GROUP_SIZE * GROUP_NEW,
        "train": sum(map(len, training_sequences(vocab))),
        "train/g": sum(map(len, training_groups(vocab))),
    }


def run_in_process(contender: str, directory: Path, device: str) -> dict[str, float]:
    """Run one contender in a fresh process."""
    command = [sys.executable, __file__, "--contender", contender, "--model", str(directory), "--device", device]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the benchmark, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "rlkit-benchmarks")
    parser.add_argument("--streams", action="store_true")
    parser.add_argument("--base-weights", nargs="+", choices=("own", "int8", "nf4"), default=["own"])
    parser.add_argument("--peer", choices=("transformers", "llama.cpp"), default="transformers")
    parser.add_argument("--gguf", type=Path, help="the model in float16 for llama.cpp")
    parser.add_argument("--llama-server", default=shutil.which("llama-server"), help="binary of llama.cpp")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer == "llama.cpp" and not options.gguf:
        parser.error("--peer llama.cpp needs --gguf FILE: convert_hf_to_gguf.py of llama.cpp writes it, --outtype f16")
    if options.streams:
        measure_streams(options)
        return
    # Set before torch loads: spinning threads would make the measurements depend on other programs.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from rlkit.engine.kernels.devices import select_device

    device = select_device(options.device).type
    if options.contender:
        contender = {"limit": limit, "engine": engine, "http": http, "peer": peer}[options.contender]
        print(json.dumps(contender(Path(options.model), device)))
        return
    directory = model_directory(options.model, options.scratch)
    results: dict[str, dict[str, float]] = {}
    for turn in range(options.rounds):
        for contender in CONTENDERS:
            print(f"round {turn + 1} of {options.rounds}: {contender}", file=sys.stderr, flush=True)
            for name, value in run_in_process(contender, directory, device).items():
                better = max if contender == "limit" or name == "memory" else min
                best_values = results.setdefault(contender, {})
                best_values[name] = better(best_values.get(name, value), value)
    report(directory, device, results)


def report(directory: Path, device: str, results: dict[str, dict[str, float]]) -> None:
    """Print the measurements."""
    flops, counts = operations(directory), units(directory)
    rate = results["limit"]["flops"]
    print(f"{directory.name} on {device}: {rate / 1e9:.0f} GFLOP/s, {results['limit']['bytes'] / 1e9:.0f} GB/s read")
    print(f"{'work':10}{'engine':>12}{'peer':>12}{'ratio':>9}{'of the limit':>15}")
    for work in WORK:
        engine_rate, peer_rate = counts[work] / results["engine"][work], counts[work] / results["peer"][work]
        share = flops[work] / rate / results["engine"][work]
        print(f"{work:10}{engine_rate:>8.0f} t/s{peer_rate:>8.0f} t/s{engine_rate / peer_rate:>8.2f}×{share:>14.0%}")
    share = results["http"]["groups"] / results["engine"]["groups"]
    print(f"http: groups take {share:.2f} times as long; a round trip takes {results['http']['trip'] * 1e3:.1f} ms")
    print(f"{'memory':10}{results['engine']['memory']:>9.2f} GB{results['peer']['memory']:>9.2f} GB")


if __name__ == "__main__":
    main()
