"""Draw the reward curves of runs, or other metrics, from their metrics.jsonl.

    python scripts/plot_run.py ~/rlkit-runs/arithmetic-20260101-120000 --out docs/assets/reward-curve.svg
    python scripts/plot_run.py ~/rlkit-runs/pirate --training teacher/v1 --evaluation eval/held_out/teacher/kl \\
        --ylabel 'KL to the teacher, nats a token' --out docs/assets/distillation.svg

Lines show a metric of training, dots one of evaluations; by default the mean rewards.
"""

from __future__ import annotations

import argparse
from itertools import cycle
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

from rlkit.store.history import read_metrics

COLOURS = ("#3b5bdb", "#e8590c", "#2b8a3e", "#862e9c")
TRAINING, EVALUATION = "env/all/reward/mean", "eval/all/reward/mean"


def curve(run: Path, key: str) -> tuple[list[int], list[float]]:
    """Return the steps of a run that have the metric `key`, and its values."""
    points = [(step, metrics[key]) for step, metrics in read_metrics(run / "metrics.jsonl") if key in metrics]
    return [step for step, _ in points], [value for _, value in points]


def draw(runs: dict[str, Path], *, training: str, evaluation: str, ylabel: str, out: Path) -> None:
    """Draw two metrics of the runs to `out`, as SVG or PNG by its suffix; rewards have an axis from 0 to 1."""
    mpl.rcParams.update(
        {"svg.hashsalt": "rlkit", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    is_reward = evaluation == EVALUATION
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for (label, run), colour in zip(runs.items(), cycle(COLOURS), strict=False):
        axes.plot(
            *curve(run, training),
            color=colour,
            linewidth=1.8,
            label=f"{label}: training{', sampled' if is_reward else ''}",
        )
        steps, rewards = curve(run, evaluation)
        if steps:
            axes.plot(
                steps,
                rewards,
                "o",
                color=colour,
                markersize=7,
                clip_on=False,
                label=f"{label}: evaluation{', greedy' if is_reward else ''}",
            )
    axes.set(xlabel="optimiser step", ylabel=ylabel, ylim=(0, 1.03 if is_reward else None), xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=10, loc="lower right" if is_reward else "best")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=160, facecolor="white", metadata={"Date": None} if out.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="[LABEL=]RUN", help="directories of runs, each with an optional label"
    )
    parser.add_argument("--training", default=TRAINING, help="metric of the lines")
    parser.add_argument("--evaluation", default=EVALUATION, help="metric of the dots")
    parser.add_argument("--ylabel", default="mean reward", help="label of the vertical axis")
    parser.add_argument("--out", type=Path, required=True, help="output file, .svg or .png")
    arguments = parser.parse_args()
    runs = dict[str, Path]()
    for run_argument in arguments.runs:
        label, _, path = str(run_argument).rpartition("=")
        run = Path(path).expanduser()
        if not (run / "metrics.jsonl").is_file():
            parser.error(f"{run} has no metrics.jsonl")
        runs[label or run.name] = run
    draw(
        runs,
        training=arguments.training,
        evaluation=arguments.evaluation,
        ylabel=arguments.ylabel,
        out=arguments.out,
    )


if __name__ == "__main__":
    main()
