"""The cookbook's training loops, unchanged, in a process of their own: what `test_cookbook.py` looks at.

    python cookbook_loops.py MODEL FOLDER    with TINKER_BASE_URL and TINKER_API_KEY set

Each loop but `imitate` takes three steps, and then goes on from its own checkpoint, as after an interruption. They have
a process of their own because they set up logging for it and never close their clients.
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import chz
import tinker

warnings.filterwarnings("ignore", "DEPRECATED: ", FutureWarning)  # the cookbook's own calls, as 0.5.8 has them

from tinker_cookbook import __file__ as cookbook_file  # noqa: E402  after the filter
from tinker_cookbook import renderers  # noqa: E402
from tinker_cookbook.distillation import train_on_policy as distillation  # noqa: E402
from tinker_cookbook.distillation.datasets import (  # noqa: E402
    DistillationDatasetConfig,
    PromptOnlyDataset,
    TeacherConfig,
)
from tinker_cookbook.preference import train_dpo as dpo  # noqa: E402
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons  # noqa: E402
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl  # noqa: E402
from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticEnv  # noqa: E402
from tinker_cookbook.rl import train as rl  # noqa: E402
from tinker_cookbook.rl.problem_env import ProblemGroupBuilder  # noqa: E402
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder  # noqa: E402
from tinker_cookbook.supervised import train as supervised  # noqa: E402
from tinker_cookbook.supervised.data import FromConversationFileBuilder  # noqa: E402
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig  # noqa: E402
from tinker_cookbook.tokenizer_utils import get_tokenizer  # noqa: E402

RENDERER = "role_colon"
EXAMPLES = Path(cookbook_file).parent / "example_data" / "conversations.jsonl"


class AnyDigit(ArithmeticEnv):
    """The cookbook's own environment, with a reward that a random model gets now and then."""

    def check_answer(self, sample_str: str) -> bool:
        return any(character.isdigit() for character in sample_str)


class Sums(RLDataset):
    def __init__(self, renderer: renderers.Renderer) -> None:
        self._renderer = renderer

    def get_batch(self, index: int) -> Sequence[ProblemGroupBuilder]:
        make = [partial(AnyDigit, index, y, renderer=self._renderer) for y in range(4)]
        return [ProblemGroupBuilder(env_thunk=thunk, num_envs=4) for thunk in make]

    def __len__(self) -> int:
        return 4


@chz.chz
class SumsBuilder(RLDatasetBuilder):
    model: str

    async def __call__(self) -> tuple[Sums, None]:
        return Sums(renderers.get_renderer(RENDERER, get_tokenizer(self.model))), None


def reinforce(model: str, folder: Path, *, goes_on: bool) -> None:
    config = rl.Config(
        model_name=model,
        recipe_name="rlkit_test",
        renderer_name=RENDERER,
        dataset_builder=SumsBuilder(model=model),
        log_path=str(folder / "rl"),
        learning_rate=1e-2,
        lora_rank=8,
        max_tokens=8,
        save_every=2,
        eval_every=0,
        max_steps=4 if goes_on else 3,
    )
    asyncio.run(rl.main(config))


def supervise(model: str, folder: Path, *, goes_on: bool) -> None:
    file = folder / "conversations.jsonl"
    talk = [{"role": "user", "content": "Say the word."}, {"role": "assistant", "content": "Abracadabra"}]
    file.write_text(f"{json.dumps({'messages': talk})}\n" * 14)
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=64, batch_size=4
    )
    config = supervised.Config(
        model_name=model,
        recipe_name="rlkit_test",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=str(file), test_size=2),
        log_path=str(folder / "supervised"),
        learning_rate=1e-2,
        lr_schedule="constant",
        num_epochs=2 if goes_on else 1,
        lora_rank=8,
        save_every=2,
        eval_every=2,
    )
    asyncio.run(supervised.main(config))


def imitate(model: str, folder: Path) -> None:
    """Train on all example conversations of the cookbook in each step, from weights that are saved for rlkit."""

    async def save_start() -> str:
        client = await tinker.ServiceClient().create_lora_training_client_async(base_model=model, rank=8, seed=3)
        return (await (await client.save_state_async("start")).result_async()).path

    start = asyncio.run(save_start())
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=1024, batch_size=128
    )
    config = supervised.Config(
        model_name=model,
        recipe_name="rlkit_test",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=str(EXAMPLES), test_size=0),
        load_checkpoint_path=start,
        log_path=str(folder / "examples"),
        learning_rate=1e-3,
        lr_schedule="constant",
        num_epochs=3,
        lora_rank=8,
        save_every=0,
        eval_every=0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
    )
    asyncio.run(supervised.main(config))
    (folder / "examples" / "start").write_text(start)


def prefer(model: str, folder: Path, *, goes_on: bool) -> None:
    file = folder / "comparisons.jsonl"
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("Abracadabra", "Hocus pocus"))
    question = [{"role": "user", "content": "Say the word."}]
    lines = [
        {"comparison": {"prompt_conversation": question, "completion_A": a, "completion_B": b}, "label": label}
        for label, a, b in (("A", chosen, rejected), ("B", rejected, chosen)) * 3
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=64, batch_size=2
    )
    comparisons = ComparisonBuilderFromJsonl(train_path=str(file))
    config = dpo.Config(
        model_name=model,
        recipe_name="rlkit_test",
        renderer_name=RENDERER,
        dataset_builder=DPODatasetBuilderFromComparisons(common_config=common, comparison_builder=comparisons),
        log_path=str(folder / "dpo"),
        learning_rate=1e-3,
        lr_schedule="constant",
        num_epochs=2 if goes_on else 1,
        lora_rank=8,
        save_every=2,
        eval_every=0,
        infrequent_eval_every=0,
    )
    dpo.main(config)


@chz.chz
class QuestionsBuilder(RLDatasetBuilder):
    model: str

    async def __call__(self) -> tuple[PromptOnlyDataset, None]:
        tokenizer = get_tokenizer(self.model)
        renderer = renderers.get_renderer(RENDERER, tokenizer)
        return PromptOnlyDataset(["Say the word."] * 24, 4, 4, renderer, tokenizer), None


def distill(model: str, folder: Path, *, goes_on: bool) -> None:
    """Bring the model that `supervise` trained back to the base model, as its teacher."""
    trained = json.loads((folder / "supervised" / "checkpoints.jsonl").read_text().splitlines()[-1])
    source = DistillationDatasetConfig(
        dataset_builder=QuestionsBuilder(model=model),
        teacher_config=TeacherConfig(base_model=model),
        groups_per_batch=4,
    )
    config = distillation.Config(
        model_name=model,
        recipe_name="rlkit_test",
        renderer_name=RENDERER,
        dataset_configs=[source],
        load_checkpoint_path=trained["state_path"],
        log_path=str(folder / "distillation"),
        learning_rate=1e-2,
        lora_rank=8,
        max_tokens=8,
        save_every=2,
        eval_every=0,
        max_steps=6 if goes_on else 3,
    )
    asyncio.run(distillation.main(config))


if __name__ == "__main__":
    for loop in (reinforce, supervise, prefer, distill):
        for goes_on in (False, True):
            loop(sys.argv[1], Path(sys.argv[2]), goes_on=goes_on)
    imitate(sys.argv[1], Path(sys.argv[2]))
