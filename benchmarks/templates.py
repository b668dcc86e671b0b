"""Compare reinforcement with uniform choice on examples/erdos_templates.yaml, at equal processor time.

    uv run python benchmarks/templates.py [--seconds 120] [--seeds 0 1 2] [--draw curves.svg]

Both choose among the same programs, with the same archive, sandbox and initial constructions. Reinforcement trains a
byte-level model of 131,776 random parameters; uniform choice has no model. Processor time is that of a contender's
process and of all that it started: programs, their sandbox, the engine, training. Printed are the best C5 of each seed
and the mean distance to the best published value; then the ratio of these distances. Linux only. The engine compiles
its kernels in its first run on a machine, which costs half a minute: run the benchmark once with few seconds before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import override

from rlkit.config.loading.load import load_config
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.testing import ScriptedPolicy, byte_model
from rlkit.training.trainer import RLTrainer
from rlkit.types import Episode, Group

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from erdos_templates import CHOICES, ChosenProgram, Templates, templates

EXAMPLE = Path(__file__).parents[1] / "examples" / "erdos_templates.yaml"
CONTENDERS = ("uniform", "reinforcement")
COLOURS = ("#e8590c", "#3b5bdb")
KNOWN = Erdos().best_known or 0.0
LETTERS = 96  # a multiple of the number of choices at each place, below 128
MARKS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)

type Curve = list[dict[str, float]]


def tree_cpu_s() -> float:
    """Return the processor seconds of this process and of all its descendants, also of those that ended."""
    children, ticks = defaultdict[int, list[int]](list), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(") ")[2].split()
        except OSError:  # it ended
            continue
        pid = int(path.parent.name)
        children[int(fields[1])].append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))  # its own, and those of children that it waited for
    pending, total = [os.getpid()], 0
    while pending:
        pid = pending.pop()
        total += ticks[pid]
        pending += children[pid]
    return total / os.sysconf("SC_CLK_TCK")


class Reporting(Templates):
    """Search that prints a line after each group."""

    @override
    def observe(self, group: Group) -> None:
        super().observe(group)
        shares = {name: fmean(episode.metrics[name] for episode in group.episodes) for name in ("valid", "improved")}
        best = self.archive.best
        line = {"cpu_s": tree_cpu_s(), "best": best.value, "pieces": len(best.construction), **shares}
        print(json.dumps({**line, "programs": self.metrics()["cpu_s"]}), flush=True)


def choose_uniformly(search: Templates, seed: int, groups: int, members: int) -> None:
    """Search with random choices until the process is killed."""
    chance = random.Random(seed)

    async def play(task: ChosenProgram, number: int) -> Episode:
        policy = ScriptedPolicy(lambda prompt: "".join(chr(chance.randrange(LETTERS)) for _ in CHOICES))
        outcome = await task.rollout(policy)
        return Episode(number, 0, policy.turns, "completed", outcome.reward, outcome.metrics, outcome.info, 0.0)

    async def play_step() -> None:
        tasks = [search.next() for _ in range(groups)]
        episodes = await asyncio.gather(*(play(task, number) for task in tasks for number in range(members)))
        for place, task in enumerate(tasks):
            members_of_task = tuple(episodes[place * members : (place + 1) * members])
            search.observe(Group("erdos", task.task_id, place, members_of_task))

    async def play_steps() -> None:
        while True:
            await play_step()

    asyncio.run(play_steps())


def contend(contender: str, seed: int, overrides: Sequence[str]) -> None:
    """Search until the process is killed, in a process of its own."""
    plain = templates(seed=seed)
    search = Reporting(plain.archive, plain.play)
    with tempfile.TemporaryDirectory() as folder:
        values = [f"model={byte_model(Path(folder) / 'model')}", f"seed={seed}", "steps=100000", *overrides]
        resolved = load_config([EXAMPLE], values)
        if contender == "uniform":
            batch = resolved.config.batch
            choose_uniformly(search, seed, batch.groups, batch.group_size)
        trainer = RLTrainer(resolved, envs={"erdos": search}, directory=Path(folder) / "run")
        asyncio.run(trainer.train())


def measure(contender: str, seed: int, seconds: float, overrides: Sequence[str]) -> Curve:
    """Return the lines of a contender until it has used its processor time."""
    command = [sys.executable, __file__, "--contender", contender, "--seeds", str(seed), "--set", *overrides]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True)
    start = templates(seed=seed).archive.best
    curve: Curve = [
        {"cpu_s": 0.0, "best": start.value, "pieces": len(start.construction), "valid": 0.0, "improved": 0.0}
    ]
    assert process.stdout is not None
    for text in process.stdout:
        line = json.loads(text)
        if line["cpu_s"] > seconds:
            break
        curve.append(line)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return curve


def best_at(curve: Curve, cpu_s: float) -> float:
    """Return the best value within a processor time."""
    return min(line["best"] for line in curve if line["cpu_s"] <= cpu_s)


def run(seeds: Sequence[int], seconds: float, overrides: Sequence[str]) -> dict[str, list[Curve]]:
    """Return the curves of each contender, by seed; one runs at a time, so that they do not disturb each other."""
    curves = {contender: list[Curve]() for contender in CONTENDERS}
    for seed in seeds:
        for contender in CONTENDERS:
            curve = measure(contender, seed, seconds, overrides)
            curves[contender].append(curve)
            values = [f"{best_at(curve, mark * seconds):.7f}" for mark in MARKS]
            print(f"seed {seed} {contender:13}", *values, f"{curve[-1]['pieces']} pieces", sep="  ", flush=True)
    return curves


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw the distance of each curve to the best published value."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    mpl.rcParams.update(
        {"svg.hashsalt": "rlkit", "font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = pyplot.subplots(figsize=(7.2, 3.2), layout="constrained")
    for (contender, of_seeds), colour in zip(curves.items(), COLOURS, strict=True):
        for number, curve in enumerate(of_seeds):
            points = [(line["cpu_s"], line["best"] - KNOWN) for line in curve[1:]]
            label = f"{contender}, {len(of_seeds)} seeds" if number == 0 else None
            axes.step(*zip(*points, strict=True), where="post", color=colour, linewidth=1.6, label=label)
    axes.set(xlabel="processor seconds", ylabel="C₅ above the best published", yscale="log", xlim=(0, None))
    axes.set_ylim(top=2e-3)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=10)
    figure.savefig(path, facecolor="white", metadata={"Date": None})


def main() -> None:
    """Run each contender with each seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the example's configuration")
    parser.add_argument("--save", type=Path, help="JSON file for the curves")
    parser.add_argument("--load", type=Path, help="JSON file of an earlier run, instead of a run")
    parser.add_argument("--draw", type=Path, help="SVG file for the curves")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options.contender, options.seeds[0], options.set)
    curves = json.loads(options.load.read_text()) if options.load else run(options.seeds, options.seconds, options.set)
    if options.save:
        options.save.write_text(json.dumps(curves))
    if options.draw:
        draw(curves, options.draw)
    gaps = [
        [fmean(best_at(c, mark * options.seconds) - KNOWN for c in curves[k]) for mark in MARKS] for k in CONTENDERS
    ]
    print("\nprocessor seconds", *(f"{mark * options.seconds:9.0f}" for mark in MARKS))
    for contender, values in zip(CONTENDERS, gaps, strict=True):
        print(f"{contender:17}", *(f"{value:9.1e}" for value in values))
    print(f"{'ratio':17}", *(f"{uniform / learned:8.2f}x" for uniform, learned in zip(*gaps, strict=True)))


if __name__ == "__main__":
    main()
