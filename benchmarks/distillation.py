"""Compare the distillation of rlkit with that of tinker-cookbook: the same engine, models, prompts and settings.

    uv run python benchmarks/distillation.py [--steps 80] [--repeat 2]

The student is a byte-level model of 131,776 random parameters; the teacher is the same model with a random matrix of
rank 4 added to each matrix of its layers. Each step plays 8 prompts, 8 replies each of 16 tokens. Printed for each
side: the divergence from the teacher, KL(q‖p) in nats a token, in the first step and at the end (mean of eight steps),
and the sampled tokens and the wall time until that mean is at most 0.3 of the first; then the ratios of cookbook to
rlkit. The clock of a side runs from its call to the end of a step, so no last checkpoint counts. The loops take turns,
so that other work on the machine hits all; the best of the repetitions counts.

The sides are rlkit with the loss `distillation` of all 259 tokens of the vocabulary, because the distribution of a
random model is nearly even; rlkit with the advantage of the sampled token; and cookbook's loop, which only has this
advantage. The last two ask for the same gradients, so their tokens differ by chance only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import chz
import tinker
import torch
import transformers
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.distillation import datasets, train_on_policy
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult

import rlkit
from rlkit.engine import EngineServer
from rlkit.testing import byte_model

GROUPS, MEMBERS, TOKENS, RATE, RANK = 8, 8, 16, 5e-3, 16
VOCABULARY = 259
PROMPTS = [f"question {number}: " for number in range(GROUPS)]
SHARE = 0.3
MEAN_STEPS = 8
CHANGE = 0.3  # norm of a matrix that is added, as a share of the norm of the matrix that it is added to


class Prompted(Env):
    """A reply to a prompt, for tinker-cookbook."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[str]]:
        return tinker.ModelInput.from_ints(list(self._prompt.encode())), ["\x00"]

    async def step(self, action: list[int], *, extra: object = None) -> StepResult:
        empty = tinker.ModelInput.empty()
        return StepResult(reward=0.0, episode_done=True, next_observation=empty, next_stop_condition=["\x00"])


class Group(EnvGroupBuilder):
    """The replies to a prompt, for tinker-cookbook."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt

    async def make_envs(self) -> Sequence[Env]:
        return [Prompted(self._prompt) for _ in range(MEMBERS)]

    def logging_tags(self) -> list[str]:
        return ["prompts"]


class Prompts(RLDataset):
    """The same prompts in each step."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [Group(prompt) for prompt in PROMPTS]

    def __len__(self) -> int:
        return self._steps


@chz.chz
class PromptsBuilder(RLDatasetBuilder):
    """Make the prompts."""

    steps: int

    async def __call__(self) -> tuple[RLDataset, None]:
        return Prompts(self.steps), None


@dataclass(frozen=True)
class Completion(rlkit.SingleTurnEnv):
    """A reply to a prompt, for rlkit."""

    text: str

    def prompt(self) -> str:
        """Return the text to complete."""
        return self.text

    def grade(self, reply: rlkit.Reply) -> float:
        """Return 0, because only the teacher counts."""
        return 0.0


@dataclass(frozen=True)
class Curve:
    """The divergence of each step of a run, and the seconds since its start at the end of each step."""

    kl: Sequence[float]
    seconds: Sequence[float]

    def means(self) -> list[float]:
        """Return the mean of the last eight steps at each step from the eighth on."""
        ends = range(MEAN_STEPS, len(self.kl) + 1)
        return [sum(self.kl[end - MEAN_STEPS : end]) / MEAN_STEPS for end in ends]

    def step_of_share(self) -> int | None:
        """Return the index of the first step whose mean is at most `SHARE` of the first step's divergence, if any."""
        means = enumerate(self.means(), start=MEAN_STEPS - 1)
        return next((index for index, mean in means if mean <= SHARE * self.kl[0]), None)


def change_model(model: Path, folder: Path) -> Path:
    """Save a copy of a model with a random matrix of rank 4 added to each matrix of its layers."""
    network = transformers.AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weights in network.named_parameters():
            if "layers" in name and weights.ndim == 2:
                left, right = (torch.randn(size, 4, generator=generator) for size in weights.shape)
                change = left @ right.T
                weights.add_(CHANGE * weights.norm() * change / change.norm())
    shutil.copytree(model, folder)
    network.save_pretrained(folder)
    return folder


def train_rlkit(
    student: Path, teacher: Path, engine: EngineServer, steps: int, folder: Path, *, top: int | None
) -> Curve:
    """Run rlkit's loop with the advantage of the sampled token, or with the loss `distillation`."""
    start_s = time.time()
    result = rlkit.train(
        model=str(student),
        envs=[Completion(prompt) for prompt in PROMPTS],
        teacher={"model": str(teacher)},
        loss="importance_sampling" if top is None else {"name": "distillation", "top_tokens": top},
        reward="none",
        steps=steps,
        name=folder.name,
        batch={"groups": GROUPS, "group_size": MEMBERS},
        sampling={"max_tokens": TOKENS, "stop": ["\x00"]},
        optimizer={"learning_rate": RATE},
        lora={"rank": RANK, "train_unembed": True},  # as the SDK does by default
        service={"base_url": engine.url},
        trackers=[],
    )
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"]]
    ends_s = [(result.directory / f"updates/{line['step']:06d}.parquet").stat().st_mtime - start_s for line in lines]
    return Curve([line["teacher/v1"] for line in lines], ends_s)


def train_cookbook(student: Path, teacher: Path, engine: EngineServer, steps: int, folder: Path) -> Curve:
    """Run tinker-cookbook's loop."""
    start_s = time.time()
    teacher_config = datasets.TeacherConfig(base_model=str(teacher))
    source = datasets.DistillationDatasetConfig(
        dataset_builder=PromptsBuilder(steps=steps), teacher_config=teacher_config, groups_per_batch=GROUPS
    )
    config = train_on_policy.Config(
        learning_rate=RATE,
        dataset_configs=[source],
        model_name=str(student),
        recipe_name="benchmark",
        max_tokens=TOKENS,
        lora_rank=RANK,
        log_path=str(folder),
        base_url=engine.url,
        eval_every=0,
        save_every=0,
    )
    with _quiet():
        asyncio.run(train_on_policy.main(config))
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if "teacher_kl" in line]
    times = [line["time/total"] for line in lines]
    first_s = path.stat().st_mtime - start_s - sum(times)  # the session; the last step is written when it ends
    return Curve([line["teacher_kl"] for line in lines], [first_s + sum(times[: end + 1]) for end in range(len(times))])


@contextmanager
def _quiet() -> Generator[None]:
    logging.disable(logging.WARNING)
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere), redirect_stdout(nowhere):
        yield
    logging.disable(logging.NOTSET)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    logging.raiseExceptions = False  # the cookbook's handlers outlive the stream that they write to
    sides = {
        "rlkit": partial(train_rlkit, top=VOCABULARY),
        "rlkit-sampled": partial(train_rlkit, top=None),
        "cookbook": train_cookbook,
    }
    best: dict[str, Mapping[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["RLKIT_RUNS_DIR"] = str(folder / "runs")
        student = byte_model(folder / "student")
        teacher = change_model(student, folder / "teacher")
        tokenizer_utils.register_tokenizer(
            str(student), lambda: transformers.AutoTokenizer.from_pretrained(str(student))
        )
        for number in range(arguments.repeat):
            for side, train in sides.items():
                with EngineServer(threads=1, root=folder / f"{side}-{number}-engine") as engine:
                    os.environ["TINKER_API_KEY"] = engine.api_key
                    curve = train(student, teacher, engine, arguments.steps, folder / f"{side}-{number}")
                place, means = curve.step_of_share(), curve.means()
                if place is None:
                    sys.exit(f"{side}: {SHARE:g} of the start is not reached in {arguments.steps} steps; raise --steps")
                numbers = {"start": curve.kl[0], "end": means[-1], "tokens": (place + 1) * GROUPS * MEMBERS * TOKENS}
                numbers["seconds"] = curve.seconds[place]
                print(f"{side:13}", *(f"{key} {value:,.3f}" for key, value in numbers.items()), sep="  ", flush=True)
                if side not in best or numbers["seconds"] < best[side]["seconds"]:
                    best[side] = numbers
    for side, key in product([*sides][:-1], ("tokens", "seconds")):
        print(f"{key} to {SHARE:g} of the start, cookbook/{side}: {best['cookbook'][key] / best[side][key]:.2f}x")


if __name__ == "__main__":
    main()
