"""Measure an agent of 20 turns with kept prefixes against recomputed prompts, in the same run.

    uv run python benchmarks/prefixes.py
    uv run python benchmarks/prefixes.py --model smollm2-135m --agents 8     (random weights of that shape)
    uv run python benchmarks/prefixes.py --model qwen3.5-small --rounds 1 --processor-time

An agent begins with a system prompt of 600 tokens. Each turn adds 200 to 400 new tokens and samples 16. Agents advance
together, a turn at a time. The peer is the engine itself without room for prefixes; each turn runs on both sides, in
alternating order, and the better time of all rounds counts. `prompts` is the time until each turn has its first two
tokens, `whole` includes the others. On a busy machine, use `--processor-time`, which sums the time of all threads. The
tokens and log-probabilities of both sides must be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from shapes import model_directory

SYSTEM, NEW, SAMPLED = 600, (200, 400), 16

type Seconds = np.ndarray  # [2, turns], with kept prefixes and without


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()) / "rlkit-benchmarks")
    parser.add_argument("--processor-time", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.processor_time else time.perf_counter
    from rlkit.engine.decode.decoder import Decoder
    from rlkit.engine.decode.requests import SampleRequest, SampleResult, StopRule
    from rlkit.engine.decode.token_sampling import DrawSettings
    from rlkit.engine.kernels.devices import batch_limits
    from rlkit.engine.kernels.threads import Lanes
    from rlkit.engine.model.lora import make_sampling_weights
    from rlkit.engine.model.weights import load_weights

    lanes = Lanes()
    base = load_weights(model_directory(options.model, options.scratch), "cpu")
    weights = make_sampling_weights(base, None, lanes.run)
    limits = batch_limits(base.norm.device)
    vocab = weights.config.vocab_size

    def play(turns: int) -> tuple[Seconds, Seconds, int]:
        """Return the seconds of both sides, by turns, and the memory of prefixes."""
        random = np.random.default_rng(0)
        sides = [
            Decoder(weights, lanes, limits=replace(limits, prefix_bytes=size)) for size in (limits.prefix_bytes, 0)
        ]
        prompts = [random.integers(10, vocab - 10, SYSTEM) for _ in range(options.agents)]
        prompt_s, whole_s = np.zeros((2, turns)), np.zeros((2, turns))
        for turn in range(turns):
            prompts = [np.concatenate([prompt, new_tokens(random, vocab)]) for prompt in prompts]
            results: list[list[SampleResult]] = [[], []]
            for i in (0, 1) if turn % 2 else (1, 0):
                start_s = clock()
                for prompt in prompts:
                    request = SampleRequest(prompt, 1, SAMPLED, turn, DrawSettings(), StopRule())
                    sides[i].submit(request, results[i].append)
                sides[i].step()
                prompt_s[i, turn] = clock() - start_s
                while sides[i].busy:
                    sides[i].step()
                whole_s[i, turn] = clock() - start_s
            samples = [[result.samples[0] for result in side] for side in results]
            for kept, computed in zip(*samples, strict=True):
                assert np.array_equal(kept.tokens, computed.tokens), "the tokens differ"
                assert np.array_equal(kept.logprobs, computed.logprobs), "the log-probabilities differ"
            prompts = [np.concatenate([p, sample.tokens]) for p, sample in zip(prompts, samples[0], strict=True)]
            print(f"turn {turn + 1}: {prompt_s[:, turn].round(2)} s for prompts", file=sys.stderr, flush=True)
        return prompt_s, whole_s, sides[0].prefix_bytes

    play(1)
    rounds = [play(options.turns) for _ in range(options.rounds)]
    print(f"{options.agents} × {options.turns} turns, results equal, {rounds[0][2] / 2**20:.0f} MiB of prefixes")
    for index, name in enumerate(("prompts", "whole")):
        kept, computed = np.min([round_s[index] for round_s in rounds], 0).sum(1)
        print(f"{name:10}{kept:>8.2f} s{computed:>10.2f} s recomputed{computed / kept:>8.2f}×")


def new_tokens(random: np.random.Generator, vocab: int) -> np.ndarray:
    """Return what a turn adds to a prompt."""
    return random.integers(10, vocab - 10, random.integers(*NEW))


if __name__ == "__main__":
    main()
