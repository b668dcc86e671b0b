"""A run through the real SDK, to a real engine, on a bad day."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.engine import EngineServer
from rlkit.training.trainer import RLTrainer
from tests.faulty_proxy import FaultyProxy


class Digits(rlkit.SingleTurnEnv):
    def __init__(self, start: str) -> None:
        self.start = start

    def prompt(self) -> str:
        return self.start

    def grade(self, reply: rlkit.Reply) -> float:
        return sum(ord("0") <= token <= ord("9") for token in reply.turn.completion) / 4


def train(model: Path, url: str, name: str) -> list[dict[str, float]]:
    settings = {
        "model": str(model),
        "name": name,
        "envs": {"digits": {}},
        "steps": 4,
        "batch": {"groups": 3, "group_size": 4},
        "sampling": {"max_tokens": 4, "stop": ["\x00"]},
        "optimizer": {"learning_rate": 1e-2},
        "lora": {"rank": 4},
        "service": {"base_url": url},
        "checkpoint": {"every": 2},
    }
    tasks = [Digits(text) for text in ("one", "two", "six", "ten")]
    result = asyncio.run(RLTrainer(load_config([], settings=settings), envs={"digits": tasks}).train())
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith("time/")} for line in lines]


# Where its goodbye is spoiled, the SDK leaves the connection of its session open.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_nothing_is_lost_and_nothing_trained_twice_on_a_bad_day(
    share: float, byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineServer(root=tmp_path, threads=1, device="cpu", models=[str(byte_model_dir)]) as engine:
        monkeypatch.setenv("TINKER_API_KEY", engine.api_key)
        clean = train(byte_model_dir, engine.url, "clean")
        with FaultyProxy(engine.url, share=share) as proxy:
            spoiled = train(byte_model_dir, proxy.url, "spoiled")
    assert spoiled == clean
    assert proxy.outcomes["through"] > 20
    assert proxy.outcomes.total() > proxy.outcomes["through"]
