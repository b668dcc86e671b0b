"""Documented runs of tinking without processes or a hub: a step of each, with a scripted model in its own format."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pandas as pd
import pytest

from rlkit.config.loading.load import load_config

from .doc_commands import ROOT
from .scripted_model import train


def adding() -> Callable[[str], str]:
    """A model that adds up, in every other reply."""
    replies = count()

    def reply(text: str) -> str:
        left, right = map(int, re.findall(r"(\d+) \+ (\d+)", text)[-1])
        return str(left + right + next(replies) % 2)

    return reply


@pytest.mark.slow
def test_the_arithmetic_of_tinking_is_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = ROOT / "examples" / "migrated" / "tinking_arithmetic.yaml"
    instead = ["model=Qwen/Qwen3.5-9B-Base", "sampling.max_tokens=8"]  # of a model that Tinker does not have any more
    assert all(value in path.read_text().partition("\nmodel:")[0] for value in instead)
    resolved = load_config([path], [*instead, "steps=1", "track=null"])
    result, requests = train(resolved, adding(), monkeypatch, directory=tmp_path / "run")
    assert (result.status, result.steps) == ("completed", 1)
    episodes = pd.read_parquet(tmp_path / "run" / "episodes")
    assert dict(episodes.groupby("draw").size()) == dict.fromkeys(range(25), 4)
    assert set(episodes.status) == {"completed"}
    assert episodes.reward.mean() == 0.5
    assert {(params.max_tokens, str(params.stop)) for params in requests.sampled} == {(8, "['\\n']")}
    assert [gradient[1:] for gradient in requests.gradients] == [("importance_sampling", None)]
