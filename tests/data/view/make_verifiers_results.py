"""Write a results folder of the older format of verifiers, by its version 0.3; README.md tells how to run this."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from datasets import Dataset
from scripted_model import start_model
from verifiers import legacy as vf
from verifiers.legacy.types import ClientConfig

QUESTIONS = ("What is 2 + 2?", "Add 2 and 3 with the tool", "reject this")


def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


async def correct(completion: list[dict[str, str]]) -> float:
    return float((completion[-1]["content"] or "").endswith(("4", "5")))


def load_environment() -> vf.Environment:
    rows = [
        {"prompt": [{"role": "user", "content": question}], "answer": "4", "info": {"level": "easy"}}
        for question in QUESTIONS
    ]
    return vf.ToolEnv(
        tools=[add], eval_dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[correct]), env_id="sums"
    )


os.environ["MODEL_KEY"] = "none"
client = ClientConfig(api_base_url=start_model(), api_key_var="MODEL_KEY", max_retries=0)
settings = {
    "num_examples": 3,
    "rollouts_per_example": 2,
    "max_concurrent": 1,
    "save_results": True,
    "results_path": Path(sys.argv[1]) / "verifiers_results",
    "on_progress": [],
}
asyncio.run(load_environment().evaluate(client, "m", **settings))
