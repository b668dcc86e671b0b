from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algorithms.lr_schedule import LearningRate, advised_learning_rate
from rlkit.config.schema import Config
from rlkit.errors import ConfigError
from rlkit.training.from_config import make_learning_rate

type Shape = Literal["constant", "linear", "cosine"]


@st.composite
def rates(draw: st.DrawFn) -> LearningRate:
    steps = draw(st.integers(1, 300))
    shape: Shape = draw(st.sampled_from(["constant", "linear", "cosine"]))
    final = 0.0 if shape == "constant" else draw(st.floats(0, 0.99))
    return LearningRate(draw(st.floats(1e-6, 1)), shape, draw(st.integers(0, steps - 1)), final, steps)


@given(rates())
def test_a_rate_rises_to_the_peak_and_falls_from_there_and_is_never_0(rate: LearningRate) -> None:
    every = [rate.at(step) for step in range(1, rate.steps + 1)]
    first = rate.warmup_steps
    assert every[first] == rate.peak
    assert all(0 < value <= rate.peak for value in every)
    assert every[: first + 1] == sorted(every[: first + 1])
    assert every[first:] == sorted(every[first:], reverse=True)
    # No jump is larger than the warm-up's part, or the steepest piece of a fall over the steps that are left.
    steepest = max(1 / (rate.warmup_steps + 1), (1 - rate.final_fraction) * 1.6 / (rate.steps - rate.warmup_steps))
    jumps = [abs(b - a) for a, b in pairwise(every)]
    assert all(jump <= rate.peak * steepest * (1 + 1e-9) for jump in jumps)


@given(rates())
def test_the_step_after_the_last_would_have_the_final_fraction(rate: LearningRate) -> None:
    end = 1.0 if rate.shape == "constant" else rate.final_fraction
    assert rate.at(rate.steps + 1) == pytest.approx(rate.peak * end, abs=1e-12)


def test_a_linear_rate_falls_in_equal_parts() -> None:
    rate = LearningRate(1.0, "linear", warmup_steps=2, final_fraction=0.5, steps=6)
    assert [rate.at(step) for step in range(1, 7)] == pytest.approx([1 / 3, 2 / 3, 1, 0.875, 0.75, 0.625])


def test_a_cosine_rate_is_in_the_middle_half_way() -> None:
    rate = LearningRate(2.0, "cosine", final_fraction=0.2, steps=10)
    assert rate.at(6) == pytest.approx(2 * 0.6)


def test_the_configuration_says_the_rate() -> None:
    optimizer = {"learning_rate": 0.5, "schedule": "linear", "warmup_steps": 1, "final_fraction": 0.1}
    config = Config.model_validate({"envs": {"arithmetic": {}}, "steps": 7, "optimizer": optimizer})
    assert make_learning_rate(config) == LearningRate(0.5, "linear", 1, 0.1, 7)


@pytest.mark.parametrize(
    ("model", "rate"),
    [
        ("Qwen/Qwen3-8B", 5e-4 * (2000 / 4096) ** 0.0775),
        ("meta-llama/Llama-3.2-1B", 5e-4 * (2000 / 2048) ** 0.781),
    ],
)
def test_auto_takes_the_advice_of_the_cookbook(model: str, rate: float) -> None:
    config = Config.model_validate({"model": model, "envs": {"a": {}}, "optimizer": {"learning_rate": "auto"}})
    assert make_learning_rate(config).at(1) == pytest.approx(rate)


def folder(path: Path, width: int) -> str:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": width}))
    return str(path)


def test_auto_reads_the_width_of_a_model_on_the_disk(tmp_path: Path) -> None:
    assert advised_learning_rate(folder(tmp_path / "Qwen3-own", 500)) == pytest.approx(5e-4 * 4**0.0775)


@pytest.mark.parametrize("name", ["own", "llama/Qwen3-own", "qwen/own"])
def test_auto_does_not_take_the_name_of_another_folder_for_the_models(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"learning_rate: there is no advice for .*; set optimizer\.learning_rate to a"
    ):
        advised_learning_rate(folder(tmp_path / name, 500))


@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M-Instruct", "openai/gpt-oss-20b"])
def test_auto_is_refused_where_nothing_is_known(model: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no advice for {model}"):
        advised_learning_rate(model)
