"""The made runs of `benchmarks/view.py`: a large one, and many small ones for the list.

A simulated training writes the folders: configuration, metrics, checkpoints. rlkit's own writers then replace the
tables of the large run's steps by tables of the size of a real one: random words with the frequencies of a language,
log-probabilities, messages, and a training sequence for each episode.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlkit.algorithms.datums import Preparation, PreparedGroup, UpdateResult
from rlkit.algorithms.estimators import GroupMean
from rlkit.algorithms.losses import ImportanceSampling
from rlkit.config.loading.load import load_config
from rlkit.env import Env, SingleTurnEnv
from rlkit.store import table
from rlkit.store.history import table_path
from rlkit.testing import ByteChat, Latency, SimulatedTinker, run_virtual
from rlkit.token_records.pieces import PieceWriter, pieces_path
from rlkit.token_records.updates import update_path, write_update
from rlkit.training.trainer import RLTrainer
from rlkit.types import Episode, Group, Message, Prompt, Reply, TokenPiece, Tokens, Turn

GROUPS, GROUP_SIZE = 25, 8
TURNS, GIVEN, SAMPLED = 2, 200, 800
LONG_TURNS, LONG_GIVEN, LONG_SAMPLED = 8, 400, 3_600
SMALL_RUNS, SMALL_STEPS = 1_000, 12
VOCABULARY = 150_000
SPECIAL = ("<|im_start|>", "<|im_end|>")
ENV = "maths"
TASKS = 1_000
BIG = "big"


@dataclass(frozen=True)
class MadeRuns:
    """Folders with made runs.

    Args:
        runs: the large run and the small ones.
        steps: steps of the large run.
    """

    runs: Path
    steps: int

    @property
    def big(self) -> Path:
        """The large run."""
        return self.runs / BIG

    @property
    def long_step(self) -> int:
        """The step whose first episode is long."""
        return self.steps // 2


def make_runs(folder: Path, *, steps: int) -> MadeRuns:
    """Make the runs in a folder, or keep those that are there."""
    made, mark = MadeRuns(folder / f"runs-{steps}", steps), folder / f"runs-{steps}" / ".made"
    if mark.exists():
        return made
    shutil.rmtree(made.runs, ignore_errors=True)
    began_s = time.perf_counter()
    _train(made.runs / "small", steps=SMALL_STEPS)
    for number in range(SMALL_RUNS):
        _copy_small_run(made.runs / "small", made.runs / f"small-{number:04d}", number)
    shutil.rmtree(made.runs / "small")
    _train(made.big, steps=steps)
    writer = TableWriter(made.big)
    for step in range(1, steps + 1):
        writer.write_step(step, is_long=step == made.long_step, skill=step / steps)
        if step % 50 == 0:
            print(f"made {step} of {steps} steps in {time.perf_counter() - began_s:.0f} s", flush=True)
    mark.touch()
    return made


@dataclass(frozen=True)
class Sum(SingleTurnEnv):
    """A task whose reward is the parity of the reply's length."""

    number: int

    @property
    def task_id(self) -> str:
        return f"task-{self.number}"

    def prompt(self) -> str:
        return f"{self.number} + 1 ="

    def grade(self, reply: Reply) -> float:
        return float(len(reply.turn.completion) % 2)


def list_sums() -> list[Env]:
    return [Sum(number) for number in range(TASKS)]


def _train(directory: Path, *, steps: int) -> None:
    """Train on a simulated service, with small groups and short replies."""
    env = f"{__file__}:{list_sums.__name__}"
    settings = {
        "model": "simulated",
        "envs": {ENV: {"env": env}},
        "steps": steps,
        "batch": {"groups": 2, "group_size": 2},
        "sampling": {"max_tokens": 8},
        "checkpoint": {"every": 50},
        "eval": {"every": 50, "envs": {ENV: {"env": env, "tasks": 4}}},
    }

    async def train() -> None:
        service = SimulatedTinker(latency=Latency(mean_tokens=4))
        config = load_config([], settings=settings)
        await RLTrainer(config, directory=directory, service=service, chat=ByteChat()).train()

    run_virtual(train())


def _copy_small_run(source: Path, directory: Path, number: int) -> None:
    shutil.copytree(source, directory)
    about = json.loads((source / "run.json").read_text())
    about |= {"name": directory.name, "started": about["started"] - 3600 * number}
    if number % 10 == 0:
        about |= {"status": "failed", "error": "EnvironmentFault: the grader raised ValueError: no answer"}
    (directory / "run.json").write_text(json.dumps(about, indent=2))


class TableWriter:
    """Writer of the tables of a large run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._rng = np.random.default_rng(0)
        letters = self._rng.integers(97, 123, (VOCABULARY, 4)).astype(np.uint8)
        words = [bytes(row).decode() for row in letters]
        self._words = np.array([*SPECIAL, ".\n", *(f" {word}" for word in words[3:])], dtype=object)
        frequencies = 1 / (np.arange(VOCABULARY - len(SPECIAL)) + 2.7)  # Zipf and Mandelbrot
        self._shares = np.cumsum(frequencies / frequencies.sum())
        pieces_path(directory).unlink()  # its tokens are bytes
        self._pieces = PieceWriter(pieces_path(directory), self._piece)
        self._preparation = Preparation({ENV: GroupMean()})

    def _piece(self, token: int) -> TokenPiece:
        return TokenPiece(self._words[token].encode(), token < len(SPECIAL))

    def write_step(self, step: int, *, is_long: bool, skill: float) -> None:
        """Write the episodes and the training sequences of a step."""
        groups = [
            self._make_group(step, position, is_long=is_long and position == 0, skill=skill)
            for position in range(GROUPS)
        ]
        turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
        self._pieces.add([tokens for turn in turns for tokens in (turn.prompt.tokens, turn.completion)])
        table.write(
            table_path(self._directory, step), [table.RecordedGroup(group, True, group.episodes) for group in groups]
        )
        prepared = asyncio.run(self._prepare(groups))
        trained = [group for group in prepared if group.data]
        logprobs = [
            (datum.logprobs + self._rng.normal(0, 0.02, len(datum.logprobs))).astype(np.float32)
            for group in trained
            for datum in group.data
        ]
        result = UpdateResult(trained, logprobs, {}, ImportanceSampling(), 1e-4)
        write_update(update_path(self._directory, step), step, prepared, result, estimators={ENV: "group_mean"})

    async def _prepare(self, groups: list[Group]) -> list[PreparedGroup]:
        return [await self._preparation.prepare(group) for group in groups]

    def _make_group(self, step: int, position: int, *, is_long: bool, skill: float) -> Group:
        draw = (step - 1) * GROUPS + position
        episodes = tuple(
            self._make_episode(member, step, is_long=is_long and member == 0, skill=skill)
            for member in range(GROUP_SIZE)
        )
        return Group(ENV, f"task-{draw % TASKS}", draw, episodes)

    def _make_episode(self, member: int, step: int, *, is_long: bool, skill: float) -> Episode:
        sizes = (LONG_TURNS, LONG_GIVEN, LONG_SAMPLED) if is_long else (TURNS, GIVEN, SAMPLED)
        turns = tuple(self._make_turns(step, *sizes))
        solved = float(self._rng.random() < 0.2 + 0.7 * skill)
        if not is_long and self._rng.random() < 0.01:
            return Episode(member, 0, turns, "failed", None, {}, {}, 61.0, "TimeoutError: no answer in 60 s")
        info = {"answer": str(member), "expected": "7"}
        return Episode(member, 0, turns, "completed", solved, {"correct": solved}, info, float(self._rng.gamma(2, 10)))

    def _make_turns(self, step: int, count: int, given: int, sampled: int) -> Iterator[Turn]:
        for index in range(count):
            prompt, completion = self._sample_words(given), self._sample_words(sampled)
            roles = ("system", "user") if index == 0 else ("user",)
            halves = np.array_split(prompt, len(roles))
            messages: list[Message] = [
                {"role": role, "content": self._text(part)} for role, part in zip(roles, halves, strict=True)
            ]
            messages.append({"role": "assistant", "content": self._text(completion)})
            yield Turn(
                Prompt(prompt),
                completion,
                -self._rng.exponential(0.5, sampled).astype(np.float32),
                np.ones(sampled, np.bool_),
                "stop",
                step - 1,
                index - 1 if index else None,
                seconds=20.0,
                messages=tuple(messages),
            )

    def _sample_words(self, count: int) -> Tokens:
        """Return tokens of a message: its words between the special tokens."""
        tokens = np.searchsorted(self._shares, self._rng.random(count)).astype(np.int32) + len(SPECIAL)
        tokens[0], tokens[-1] = 0, 1
        return tokens

    def _text(self, tokens: Tokens) -> str:
        return "".join(self._words[tokens[tokens >= len(SPECIAL)]])
