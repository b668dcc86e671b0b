"""tinker-cookbook's own training loops on the engine, unchanged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlkit.engine import EngineServer

from .conftest import connect
from .helpers import prompt

STEPS = {"rl": 4, "supervised": 6}  # three of them in each before the loop is started again


@dataclass(frozen=True)
class Runs:
    """Files of the finished loops, and the server that they used."""

    server: EngineServer
    model: str
    folder: Path
    log: str

    def metrics(self, loop: str) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / loop / "metrics.jsonl").read_text().splitlines()]

    def checkpoints(self, loop: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in (self.folder / loop / "checkpoints.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(byte_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("cookbook")
    model = str(byte_model_dir)
    with EngineServer(root=folder / "root", threads=1) as server:
        environ = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.api_key}
        script = Path(__file__).with_name("cookbook_loops.py")
        child = subprocess.run(
            [sys.executable, str(script), model, str(folder)],
            env={**environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == 0, child.stderr[-4000:]
        yield Runs(server, model, folder, child.stdout + child.stderr)


@pytest.mark.parametrize("loop", STEPS)
def test_a_loop_takes_three_steps_and_resumes_from_its_checkpoint(runs: Runs, loop: str) -> None:
    metrics = runs.metrics(loop)
    assert [line["step"] for line in metrics] == list(range(STEPS[loop]))
    for line in metrics:
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))
    assert max(line["unclipped_grad_l2:mean"] for line in metrics) > 0  # of one step all rewards may be equal
    first, *_, last = runs.checkpoints(loop)
    assert first["state_path"].partition("/weights/")[0] != last["state_path"].partition("/weights/")[0]
    assert runs.log.count("Resumed training from tinker://") == len(STEPS)


def test_the_sampler_and_the_trainer_of_the_rl_loop_agree(runs: Runs) -> None:
    for line in runs.metrics("rl"):
        assert abs(line["optim/kl_sample_train_v1"]) < 1e-5


def test_the_supervised_loop_learns_across_its_interruption(runs: Runs) -> None:
    trained = [line["train_mean_nll"] for line in runs.metrics("supervised")]
    assert trained[-1] < trained[0] / 2  # the adapter has no seed, so a single step may go up
    held_out = [line["test/nll"] for line in runs.metrics("supervised") if "test/nll" in line]
    assert held_out[-1] < held_out[0]


def test_a_resumed_loop_uses_the_renderer_of_its_checkpoint(runs: Runs) -> None:
    assert runs.log.count("Renderer metadata matches for checkpoint") == len(STEPS)


@pytest.mark.parametrize("loop", STEPS)
def test_the_checkpoints_of_a_loop_can_be_trained_from_and_sampled_from(runs: Runs, loop: str) -> None:
    last = runs.checkpoints(loop)[-1]
    with connect(runs.server) as client:
        trainer = client.create_training_client_from_state_with_optimizer(last["state_path"]).result()
        assert trainer.get_info().model_data.model_name == runs.model
        sampler = client.create_sampling_client(last["sampler_path"]).result()
        saved = sampler.compute_logprobs(prompt(1, 2, 3)).result()
        live = trainer.save_weights_and_get_sampling_client().result()
        assert live.compute_logprobs(prompt(1, 2, 3)).result() == saved
