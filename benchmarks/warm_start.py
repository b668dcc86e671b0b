"""Compare a warm start with reinforcement after it, and each alone, at equal tokens, on examples/warm_start.yaml.

    uv run python benchmarks/warm_start.py [--tokens 120000] [--seeds 3]

Every run has the same budget in tokens of all kinds (prompt, sampled, trained), on the embedded engine without a key.
Printed is the share of 64 held-out tasks that the greedy policy solves with the last weights, by seed, and their mean;
the ratio is that of the mean with both to the best mean with one. Nine runs take half an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rlkit.config.loading.load import load_config
from rlkit.training.trainer import RLTrainer

EXAMPLE = Path(__file__).parents[1] / "examples" / "warm_start.yaml"
METRIC = "eval/order/reward/mean"

ARMS: Mapping[str, Sequence[str]] = {
    "warm start, then reinforcement": (),
    "reinforcement alone": ("warm_start=null",),
    "conversations alone": (
        "warm_start=null",
        "envs.order=null",
        f"source.files={EXAMPLE.with_suffix('.jsonl')}",
        "batch=null",
        "batch.groups=8",
        "optimizer.learning_rate=5e-4",
    ),
}


def solved(overrides: Sequence[str], *, seed: int, tokens: int) -> float:
    """Return the share of held-out tasks that are solved once a run has used its tokens."""
    values = [*overrides, f"seed={seed}", f"budget_tokens={tokens}", "steps=100000", "eval.every=0"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = RLTrainer(load_config([EXAMPLE], values), directory=Path(folder) / "run")
        result = asyncio.run(trainer.train())
        checkpoint = result.checkpoint
        assert checkpoint is not None
        from rlkit.evaluation.evaluate import evaluate

        return asyncio.run(evaluate(load_config([EXAMPLE]), checkpoint=checkpoint.sampler))[METRIC]


def main() -> None:
    """Run each arm with each seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=120_000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    means = dict[str, float]()
    for name, overrides in ARMS.items():
        shares = [solved(overrides, seed=seed, tokens=options.tokens) for seed in range(options.seeds)]
        means[name] = fmean(shares)
        print(f"{name:32} {'  '.join(f'{share:.2f}' for share in shares)}  mean {means[name]:.2f}", flush=True)
    both, *alone = means.values()
    ratio = "no other solves any" if not max(alone) else f"{both / max(alone):.2f}x the best of the others"
    print(f"\nheld-out tasks solved after {options.tokens:,} tokens: {both:.2f}, {ratio}")


if __name__ == "__main__":
    main()
