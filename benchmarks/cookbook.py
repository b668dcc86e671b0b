"""Run tinker-cookbook's training loop on the simulated service. Importing this module imports tinker-cookbook.

prepare()
await train(workload, directory, mode="async", staleness=1, played=Played(), client=lambda: Client(...))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import chz
import tinker
import tinker_cookbook
import workloads
from service import Client
from tinker_cookbook import tokenizer_utils
from tinker_cookbook.rl import train as loop
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from workloads import Played, Workload

from rlkit.testing import ByteChat

MODEL = "simulated/bytes"
VERSION = tinker_cookbook.__version__
MINIBATCHES = 4


class Rollout(Env):
    """A rollout of a task, for tinker-cookbook."""

    def __init__(self, workload: Workload, number: int, played: Played) -> None:
        self._workload, self._number, self._played = workload, number, played
        self._tokens: list[int] = []
        self._turn = self._last = 1

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[str]]:
        self._played.begin(self._number)
        self._tokens = list(workloads.question(self._number).encode())
        return tinker.ModelInput.from_ints(self._tokens), []

    async def step(self, action: list[int], *, extra: object = None) -> StepResult:
        if self._turn == 1:
            self._last = workloads.turns(self._workload, action)
        await workloads.use_tool(self._workload, action)
        done = self._turn == self._last
        if done:
            self._played.end()
        else:
            self._tokens = [*self._tokens, *action, *workloads.observation(self._turn)]
        self._turn += 1
        return StepResult(
            reward=workloads.reward(self._workload, self._number, action) if done else 0.0,
            episode_done=done,
            next_observation=tinker.ModelInput.from_ints([] if done else self._tokens),
            next_stop_condition=[],
        )


class Group(EnvGroupBuilder):
    """The group of a task, for tinker-cookbook."""

    def __init__(self, workload: Workload, number: int, played: Played) -> None:
        self._workload, self._number, self._played = workload, number, played

    async def make_envs(self) -> Sequence[Env]:
        return [Rollout(self._workload, self._number, self._played) for _ in range(self._workload.group_size)]

    def logging_tags(self) -> list[str]:
        return ["work"]


class Data(RLDataset):
    """Tasks in the order of their numbers."""

    def __init__(self, workload: Workload, batches: int, played: Played) -> None:
        self._workload, self._batches, self._played = workload, batches, played

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        first = index * self._workload.groups
        return [Group(self._workload, first + place, self._played) for place in range(self._workload.groups)]

    def __len__(self) -> int:
        return self._batches


@chz.chz
class DataBuilder(RLDatasetBuilder):
    """Make the tasks."""

    workload: Workload
    batches: int
    played: Played

    async def __call__(self) -> tuple[RLDataset, None]:
        return Data(self.workload, self.batches, self.played), None


class _Bytes:
    """A tokenizer of bytes, with which the peer prints samples."""

    eos_token_id = 0
    name_or_path = MODEL

    def __init__(self) -> None:
        self._chat = ByteChat()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._chat.encode(text).tolist()

    def decode(self, tokens: Sequence[int] | int, **_: object) -> str:
        return bytes([tokens] if isinstance(tokens, int) else tokens).decode(errors="replace")


def prepare() -> None:
    """Prepare this process for the peer; call it once."""
    tokenizer_utils.register_tokenizer(MODEL, _Bytes)
    if hasattr(loop, "fetch_model_pricing"):
        loop.fetch_model_pricing = lambda name: None  # it would request prices from the network


@contextmanager
def _stand_in(client: Callable[[], Client]) -> Iterator[None]:
    make = tinker.ServiceClient
    tinker.ServiceClient = lambda **_: client()  # type: ignore[assignment,misc]  cookbook makes its own client
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere), redirect_stdout(nowhere):
            yield
    finally:
        tinker.ServiceClient = make


async def train(
    workload: Workload,
    directory: Path,
    *,
    mode: str,
    staleness: int,
    played: Played,
    client: Callable[[], Client],
    informative: bool = False,
) -> None:
    """Run the peer's loop; `informative` drops groups with equal rewards. Terminal output is discarded."""
    with _stand_in(client):
        await loop.main(
            loop.Config(
                learning_rate=1e-4,
                dataset_builder=DataBuilder(workload=workload, batches=workload.steps, played=played),
                model_name=MODEL,
                recipe_name="benchmark",
                max_tokens=workloads.MAX_TOKENS,
                log_path=str(directory),
                save_every=0,
                eval_every=0,
                remove_constant_reward_groups=informative,
                async_config=(
                    loop.AsyncConfig(max_steps_off_policy=staleness, groups_per_batch=workload.groups)
                    if mode == "async"
                    else None
                ),
                stream_minibatch_config=(
                    loop.StreamMinibatchConfig(groups_per_batch=workload.groups, num_minibatches=MINIBATCHES)
                    if mode == "stream"
                    else None
                ),
            )
        )
