"""The info of an outcome is recorded as JSON, equal in memory, in the journal and in the table."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.errors import RewardError
from rlkit.rollout.validation import as_outcome
from tests.simulation import Simulation, Word


class Colour(enum.Enum):
    RED = 1


@dataclass
class Answer:
    value: int


def circle() -> list[Any]:
    """A list that holds itself."""
    ring: list[Any] = []
    ring.append(ring)
    return ring


ODD: dict[str, tuple[object, object]] = {
    "path": (PurePosixPath("out/x"), "PurePosixPath('out/x')"),
    "bytes": (b"\x00", "b'\\x00'"),
    "set": ({1}, "{1}"),
    "object": (Answer(3), "Answer(value=3)"),
    "enum": (Colour.RED, "<Colour.RED: 1>"),
    "array": (np.zeros(2), "array([0., 0.])"),
    "integer of numpy": (np.int64(3), 3),
    "number of numpy": (np.float32(0.5), 0.5),
    "truth of numpy": (np.bool_(True), True),
    "not a number": (math.nan, "nan"),
    "infinite": ([1.0, -math.inf], [1.0, "-inf"]),
    "tuple": ((1, "a"), [1, "a"]),
    "keys": ({1: 2, None: Colour.RED}, {"1": 2, "null": "<Colour.RED: 1>"}),
    "surrogate": ("\ud800", "\\ud800"),
    "large": (10**40, str(10**40)),
    "messages": ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
}


@pytest.mark.parametrize("name", ODD)
def test_values_outside_json_become_text(name: str) -> None:
    value, expected = ODD[name]
    info = as_outcome(rlkit.Outcome(1.0, info={"it": value})).info  # type: ignore[dict-item]  on purpose
    assert info == {"it": expected}
    assert json.loads(json.dumps(info, allow_nan=False)) == info


@pytest.mark.parametrize(
    "info", [{"it": circle()}, {"it": {("a", 1): 2}}, {("a", 1): 2}], ids=["circle", "inner", "outer"]
)
def test_info_that_cannot_be_recorded_fails_the_rollout(info: Any) -> None:
    with pytest.raises(RewardError, match="which cannot be recorded"):
        as_outcome(rlkit.Outcome(1.0, info=info))


@pytest.mark.parametrize("info", [None, ["a"], "text", 3])
def test_info_that_is_no_mapping_fails_the_rollout(info: object) -> None:
    with pytest.raises(RewardError, match="info maps names to values"):
        as_outcome(rlkit.Outcome(1.0, info=info))  # type: ignore[arg-type]  on purpose


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=3))
def test_json_is_kept_unchanged(info: Mapping[str, Any]) -> None:
    assert as_outcome(rlkit.Outcome(1.0, info=info)).info == info


class Talkative(Word):
    """Says everything that is odd, and sometimes fails with a text that cannot be written."""

    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
        reply = await policy.chat([{"role": "user", "content": self.task_id}])
        if len(reply.text) % 5 == 0:
            raise ValueError("the answer \ud800 cannot be read")
        if len(reply.text) % 7 == 0:
            return rlkit.Outcome(1.0, info=["none"])  # type: ignore[arg-type]  on purpose
        odd: Any = {name: value for name, (value, _) in ODD.items()}
        return rlkit.Outcome(float(reply.text.count("e")), info=odd)


def test_run_records_info_of_its_environments_and_resumes_with_it(tmp_path: Path) -> None:
    def run(name: str, steps: int) -> Simulation:
        return Simulation(tmp_path / name, settings={"steps": steps}, tasks=[Talkative(number) for number in range(40)])

    uninterrupted, resumed = run("whole", 3), run("again", 2)
    uninterrupted.train()
    resumed.train()
    resumed.world.checkpoints.clear()
    resumed.settings = {"steps": 3}
    resumed.train(resume=True)
    assert resumed.weights() == uninterrupted.weights()
    episodes = pd.read_parquet(uninterrupted.directory / "episodes")
    infos = [json.loads(info) for info in episodes[episodes.status == "completed"]["info"]]
    assert infos
    for info in infos:
        assert {name: info[name] for name in ODD} == {name: expected for name, (_, expected) in ODD.items()}
    errors = episodes.error.dropna().tolist()
    assert any("the answer \\ud800 cannot be read" in error for error in errors)
    assert any("info maps names" in error for error in errors)
