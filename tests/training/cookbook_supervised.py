"""The cookbook's supervised loop, unchanged, in a process of its own: what `test_supervised_curve.py` compares with.

python cookbook_supervised.py MODEL FOLDER CHECKPOINT STEPS    with TINKER_BASE_URL and TINKER_API_KEY set
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "DEPRECATED: ", FutureWarning)  # the cookbook's own calls, as 0.5.8 has them

import tinker_cookbook  # noqa: E402  after the filter
from tinker_cookbook.supervised import train as supervised  # noqa: E402
from tinker_cookbook.supervised.data import FromConversationFileBuilder  # noqa: E402
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig  # noqa: E402

CONVERSATIONS = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"
RENDERER, RATE = "role_colon", 3e-3


def main(model: str, folder: str, checkpoint: str, steps: int) -> None:
    """Take steps on all conversations at once, so that their order does not matter."""
    count = sum(1 for line in CONVERSATIONS.read_text().splitlines() if line.strip())
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=RENDERER, max_length=4096, batch_size=count
    )
    config = supervised.Config(
        model_name=model,
        recipe_name="rlkit_test",
        renderer_name=RENDERER,
        load_checkpoint_path=checkpoint,
        dataset_builder=FromConversationFileBuilder(common_config=common, file_path=str(CONVERSATIONS)),
        log_path=folder,
        learning_rate=RATE,
        lr_schedule="constant",
        num_epochs=steps,
        save_every=0,
        eval_every=0,
    )
    asyncio.run(supervised.main(config))


if __name__ == "__main__":
    main(*sys.argv[1:4], steps=int(sys.argv[4]))
