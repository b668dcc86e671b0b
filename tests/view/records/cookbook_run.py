"""Write a log folder with tinker-cookbook's own functions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import tinker
from tinker_cookbook.checkpoint_utils import CheckpointRecord
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.renderers.base import Message, ParseTermination, Renderer
from tinker_cookbook.rl.problem_env import ProblemEnv, ProblemGroupBuilder
from tinker_cookbook.rl.rollout_logging import serialize_rollout_summaries
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.train import _get_logtree_scope  # pyright: ignore[reportPrivateUsage]  as the training loop does
from tinker_cookbook.rl.types import TrajectoryGroup
from tinker_cookbook.stores.training_store import TrainingRunStore
from tinker_cookbook.utils.ml_log import JsonLogger

QUESTION = "What is 2 + 2? <script>alert(1)</script>"
REPLIES = ("four", "<script>4</script>", "4", "5")


class CharacterRenderer:
    """A renderer with a token for each character."""

    def build_generation_prompt(self, messages: Sequence[Message]) -> tinker.ModelInput:
        return tinker.ModelInput.from_ints([ord(character) for character in str(messages[-1]["content"])])

    def parse_response(self, tokens: list[int]) -> tuple[Message, ParseTermination]:
        return Message(role="assistant", content="".join(map(chr, tokens))), ParseTermination.STOP_SEQUENCE

    def get_stop_sequences(self) -> list[int]:
        return [0]


class Sum(ProblemEnv):
    def get_question(self) -> str:
        return QUESTION

    def check_answer(self, sample_str: str) -> bool:
        return "4" in sample_str

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return "4"


def write_run(folder: Path) -> None:
    """Write a run of two iterations, with an evaluation at the first."""
    logger = JsonLogger(folder)
    logger.log_hparams({"model_name": "m/small", "learning_rate": 1e-4, "num_groups_to_log": 1})
    for iteration in range(2):
        for base, split in [("train", "train"), *([("eval_test", "eval/test")] if iteration == 0 else [])]:
            groups = asyncio.run(play(folder, logger.store, iteration, base))
            records = serialize_rollout_summaries(
                split=split,
                iteration=iteration,
                trajectory_groups_P=groups,
                taglist_P=[["sums"]] * len(groups),
                sampling_client_steps_P=[iteration] * len(groups),
            )
            logger.store.write_rollouts(iteration, records, base_name=base)
        metrics = {
            "progress/batch": iteration,
            "progress/done_frac": (iteration + 1) / 2,
            "env/all/reward/total": 0.25 + iteration / 2,
            "env/all/total_ac_tokens": 11,
            "env/all/total_ob_tokens": 80,
            "optim/kl_sample_train_v1": float("nan"),
            **({"test/env/all/reward/total": 0.5} if iteration == 0 else {}),
        }
        logger.log_metrics(metrics, step=iteration)
    checkpoint = CheckpointRecord(name="final", batch=2, final=True, state_path="tinker://s", sampler_path="tinker://w")
    logger.store.write_checkpoint(checkpoint.to_dict())


async def play(folder: Path, store: TrainingRunStore, iteration: int, base: str) -> list[TrajectoryGroup]:
    """Play two groups, of which the first is logged; the members of the first are played in another order."""
    replies = iter((REPLIES[2], REPLIES[0], REPLIES[1], REPLIES[3]))

    async def complete(prompt: tinker.ModelInput, stop: object, **limits: object) -> TokensWithLogprobs:
        text = next(replies)
        await asyncio.sleep(0.02 if text == "4" else 0)
        return TokensWithLogprobs(tokens=[ord(letter) for letter in text], maybe_logprobs=[-0.5] * len(text))

    builder = ProblemGroupBuilder(lambda: Sum(cast("Renderer", CharacterRenderer())), num_envs=2, dataset_name="sums")
    path = folder / f"iteration_{iteration:06d}"
    groups = list[Any]()
    with _get_logtree_scope(path, 1, base, "Iteration", iteration, store):
        groups.append(await do_group_rollout(builder, complete))
    groups.append(await do_group_rollout(builder, complete))
    return groups
