"""tinker-cookbook's own training loops on the engine, unchanged."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlkit.config.loading.load import load_config
from rlkit.engine import EngineServer
from rlkit.store.history import read_metrics
from rlkit.training.trainer import RLTrainer

from .conftest import connect
from .helpers import prompt

# Three of them in each before the loop is started again.
STEPS = {"rl": 4, "supervised": 6, "dpo": 6, "distillation": 6}


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


pytestmark = pytest.mark.slow  # the loops take a minute


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
    first, *_, last = runs.checkpoints(loop)
    assert first["state_path"].partition("/weights/")[0] != last["state_path"].partition("/weights/")[0]
    assert len(re.findall("Resumed (?:DPO )?training from tinker://", runs.log)) == len(STEPS)


@pytest.mark.parametrize("loop", sorted({*STEPS} - {"dpo"}))  # which does not log the norm
def test_a_loop_has_gradients(runs: Runs, loop: str) -> None:
    assert (
        max(line["unclipped_grad_l2:mean"] for line in runs.metrics(loop)) > 0
    )  # of one step all rewards may be equal


@pytest.mark.parametrize("loop", ["rl", "distillation"])
def test_the_sampler_and_the_trainer_of_a_loop_agree(runs: Runs, loop: str) -> None:
    for line in runs.metrics(loop):
        assert abs(line["optim/kl_sample_train_v1"]) < 1e-5


def test_the_supervised_loop_learns_across_its_interruption(runs: Runs) -> None:
    trained = [line["train_mean_nll"] for line in runs.metrics("supervised")]
    assert trained[-1] < trained[0] / 2  # the adapter has no seed, so a single step may go up
    held_out = [line["test/nll"] for line in runs.metrics("supervised") if "test/nll" in line]
    assert held_out[-1] < held_out[0]


def test_rlkit_has_the_losses_of_the_supervised_loop_on_its_example_conversations(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tinker_cookbook

    monkeypatch.setenv("TINKER_API_KEY", runs.server.api_key)
    settings: dict[str, object] = {
        "model": runs.model,
        "source": {"files": str(Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl")},
        "epochs": 3,
        "batch": {"groups": 128},
        "optimizer": {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        "lora": {"rank": 8},
        "chat": {"renderer": "role_colon"},
        "load_checkpoint": (runs.folder / "examples" / "start").read_text(),
        "service": {"base_url": runs.server.url},
    }
    result = asyncio.run(RLTrainer(load_config([], settings=settings), directory=tmp_path / "run").train())
    losses = [line["optim/nll"] for _, line in read_metrics(result.directory / "metrics.jsonl")]
    expected = [line["train_mean_nll"] for line in runs.metrics("examples")]
    assert losses == pytest.approx(expected, rel=0.01)
    assert losses[2] < losses[1] < losses[0]


def test_dpo_prefers_the_chosen_replies_to_its_reference(runs: Runs) -> None:
    for start in (0, 3):  # the loop takes the weights that it starts with as its reference
        first, *rest = runs.metrics("dpo")[start : start + 3]
        assert first["margin"] == pytest.approx(0, abs=1e-4)
        assert first["dpo_loss"] == pytest.approx(math.log(2), abs=1e-4)
        assert [line["accuracy"] for line in rest] == [1, 1]
        assert 0.1 < rest[0]["margin"] < rest[1]["margin"]
        for line in rest:
            assert line["rejected_reward"] < 0 < line["chosen_reward"]
            # beta is 0.1: both pairs of a batch are the same, so that the mean loss is that of the mean margin
            assert line["dpo_loss"] == pytest.approx(math.log1p(math.exp(-line["margin"])), rel=1e-4)


def test_distillation_brings_the_student_closer_to_its_teacher(runs: Runs) -> None:
    divergence = [line["teacher_kl"] for line in runs.metrics("distillation")]
    # The student's reply is almost certain, and 5.5 nats a token to its teacher: log(256), as for any bytes.
    assert 2.5 < divergence[0] < 7
    assert divergence[-1] < divergence[0] / 2  # the adapter has no seed, so a single step may go up


def test_a_loop_that_starts_from_a_checkpoint_uses_its_renderer(runs: Runs) -> None:
    # Each loop once when it resumes, and distillation in its first start, from the supervised loop's weights.
    assert runs.log.count("Renderer metadata matches for checkpoint") == len(STEPS) + 1


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
