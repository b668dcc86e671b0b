"""A supervised run against the cookbook's loop, on its example conversations, with one server and one start."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlkit.config.loading.load import load_config
from rlkit.engine.server.server import EngineServer
from rlkit.store.history import read_metrics
from rlkit.training.trainer import RLTrainer
from tests.engine.conftest import connect
from tests.training.cookbook_supervised import CONVERSATIONS, RATE, RENDERER

STEPS = 6


def save_start(server: EngineServer, model: str) -> str:
    """Save an adapter that was not trained, from which both loops start."""
    with connect(server) as client:
        trainer = client.create_lora_training_client(base_model=model, rank=8, seed=3).result()
        return trainer.save_state("start").result().path


def run_cookbook(server: EngineServer, model: str, folder: Path, start: str) -> list[float]:
    script = Path(__file__).with_name("cookbook_supervised.py")
    child = subprocess.run(
        [sys.executable, str(script), model, str(folder), start, str(STEPS)],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": server.api_key,
            "HF_HUB_OFFLINE": "1",
            "TINKER_TELEMETRY": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return [json.loads(line)["train_mean_nll"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_curve_of_losses_is_that_of_the_cookbook(
    byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(byte_model_dir)
    with EngineServer(root=tmp_path / "root", threads=1) as server:
        start = save_start(server, model)
        expected = run_cookbook(server, model, tmp_path / "cookbook", start)
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", server.api_key)
        settings = {
            "model": model,
            "source": {"files": str(CONVERSATIONS)},
            "load_checkpoint": start,
            "steps": STEPS,
            "batch": {"groups": 128, "normalize": "sequence"},  # each conversation counts as much, as in the cookbook
            "optimizer": {"learning_rate": RATE},
            "lora": {"rank": 8},
            "chat": {"renderer": RENDERER},
        }
        result = asyncio.run(RLTrainer(load_config([], settings=settings), directory=tmp_path / "run").train())
    lines = dict(read_metrics(result.directory / "metrics.jsonl"))
    curve = [lines[step]["service/loss:sum"] for step in range(1, STEPS + 1)]
    assert curve == pytest.approx(expected, rel=0.01)
    assert curve[-1] < 0.8 * curve[0]
    print(curve, expected)
