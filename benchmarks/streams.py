"""Streams of one engine or of llama.cpp, for `benchmarks/engine.py --streams`; prints one line of JSON."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np

RANK, PROMPT, TRAINED, LENGTH = 32, 13, 8, 100
# Number of streams, and tokens of each.
STREAMS = {1: 48, 8: 32, 64: 24}
PORT = 18431


def prompt(seed: int, vocab: int) -> np.ndarray:
    """Return a random prompt."""
    return np.random.default_rng(seed).integers(10, vocab - 10, PROMPT)


def engine(directory: Path, base_weights: str) -> dict[str, float]:
    """Measure the engine with an adapter, and without one as llama.cpp."""
    from rlkit.engine.decode.decoder import Decoder
    from rlkit.engine.decode.requests import SampleRequest, StopRule
    from rlkit.engine.decode.token_sampling import DrawSettings
    from rlkit.engine.kernels.threads import Lanes
    from rlkit.engine.model.lora import Adapter, LoraSettings, make_adapter, make_sampling_weights
    from rlkit.engine.model.weights import load_weights
    from rlkit.engine.training.learner import Learner
    from rlkit.engine.training.losses import make_loss
    from rlkit.engine.training.packing import Example

    lanes, results = Lanes(), dict[str, float]()
    weights = load_weights(directory, quantisation=None if base_weights == "own" else base_weights)
    vocab = weights.config.vocab_size
    adapter = make_adapter(weights.config, LoraSettings(RANK, train_unembed=False), seed=0)

    def sample(count: int, new: int, adapter: Adapter | None) -> float:
        start = time.perf_counter()
        decoder = Decoder(make_sampling_weights(weights, adapter, lanes.run), lanes)
        version_s = time.perf_counter() - start
        for seed in range(count):
            request = SampleRequest(prompt(seed, vocab), 1, new + 1, seed, DrawSettings(), StopRule())
            decoder.submit(request, lambda _: None)
        decoder.step()
        tokens, start = 0, time.perf_counter() - version_s
        while decoder.busy:
            tokens += decoder.running_count
            decoder.step()
        return tokens / (time.perf_counter() - start)

    sample(2, 2, adapter)
    for count, new in STREAMS.items():
        for used, name in ((None, "base model"), (adapter, "adapter")):
            results[f"{count} streams, {name}"] = max(sample(count, new, used) for _ in range(2))
    results["GiB sampling"] = _peak_gib()
    learner, examples = Learner(weights, adapter, lanes), list[Example]()
    for seed in range(TRAINED):
        tokens = np.random.default_rng(seed).integers(10, vocab - 10, LENGTH)
        inputs = {"advantages": np.ones(LENGTH, np.float32), "logprobs": np.full(LENGTH, -11, np.float32)}
        examples.append(Example(tokens, np.append(tokens[1:], 0), inputs))
    best_s = np.inf
    for _ in range(2):
        start = time.perf_counter()
        learner.run(examples, make_loss("importance_sampling", {}))
        best_s = min(best_s, time.perf_counter() - start)
    return {**results, "training": TRAINED * LENGTH / best_s, "GiB": _peak_gib()}


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def _llama_server(gguf: str, binary: str) -> Iterator[str]:
    slots, context, threads = max(STREAMS), max(STREAMS) * 128, os.cpu_count() or 1
    if binary:
        options = {"-m": gguf, "-np": slots, "-c": context, "-t": threads, "--port": PORT}
        process = subprocess.Popen([binary, *(str(part) for pair in options.items() for part in pair)])
        try:
            yield f"http://127.0.0.1:{PORT}"
        finally:
            process.terminate()
            process.wait()
        return
    try:
        import xllamacpp
    except ImportError:
        sys.exit("llama.cpp: run with `uv run --with xllamacpp`, or give the binary as --llama-server")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx, params.port = gguf, slots, context, PORT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    yield server.listening_address


def llama_cpp(gguf: str, binary: str) -> dict[str, float]:
    """Measure a server of llama.cpp; it has no adapter."""

    def complete(url: str, seed: int, new: int) -> dict[str, float]:
        body = {"prompt": prompt(seed, 40_000).tolist(), "n_predict": new + 1, "ignore_eos": True, "seed": seed}
        body |= {"samplers": ["temperature"], "temperature": 1.0, "cache_prompt": False}
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())["timings"]

    results: dict[str, float] = {}
    with _llama_server(gguf, binary) as url, ThreadPoolExecutor(max(STREAMS)) as pool:
        for _ in range(600):  # until the model is loaded
            try:
                complete(url, 0, 2)
                break
            except OSError:
                time.sleep(0.2)
        for count, new in STREAMS.items():
            for _ in range(2):
                timings = list(pool.map(complete, [url] * count, range(count), [new] * count))
                # The server's own time, without its prompts: streams of one length run side by side.
                slowest_s = max(timing["predicted_ms"] for timing in timings) / 1000
                name = f"{count} streams"
                results[name] = max(results.get(name, 0), count * new / slowest_s)
    return results


if __name__ == "__main__":
    _, contender, model, option = sys.argv
    measured = engine(Path(model), option) if contender == "engine" else llama_cpp(model, option)
    print(json.dumps({name: round(value, 2) for name, value in measured.items()}), flush=True)
    os._exit(0)  # the library of llama.cpp may not end by itself
