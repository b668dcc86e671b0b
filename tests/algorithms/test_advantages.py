from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.algorithms.advantages import (
    FunctionEstimator,
    advantages_by_turn,
    as_estimator,
    estimate_advantages,
    estimate_metrics,
    step_estimator,
)
from rlkit.algorithms.datums import Preparation, PreparedGroup
from rlkit.algorithms.estimator import Estimator
from rlkit.algorithms.estimators import (
    ESTIMATORS,
    PKPO,
    BatchStd,
    EntropicAdaptive,
    EntropicValidAware,
    GroupMean,
)
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_estimators, load_object
from rlkit.config.schema import Config
from rlkit.dry_run.pilot import NudgedEstimator
from rlkit.errors import ConfigError, EnvironmentFault
from rlkit.testing import Fault, World
from rlkit.types import Group
from tests.builders import episode, group, turn
from tests.simulation import Simulation, Talk, Word


def load_mine(name: str, folder: Path) -> Estimator:
    """The one of that name in `mine.py`, as a run finds it."""
    return load_estimators(make_config(advantage=f"{folder}/mine.py:{name}"), {})["a"]


def test_settings_reach_the_formula() -> None:
    played = group([0, 1, 3])
    config = make_config(advantage={"name": "pkpo", "k": 2})
    advantages = estimate_advantages(load_estimators(config, {})["a"], [played])
    assert advantages == estimate_advantages(PKPO(k=2), [played])
    assert advantages != estimate_advantages(PKPO(k=3), [played])


def test_an_estimator_is_a_function_or_an_estimator_at_an_import_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\nfrom rlkit.algorithms.estimators import PKPO\n"
        "def ones(group):\n    return np.ones(len(group.episodes))\nbest = PKPO(k=3)\nnumber = 3\n"
    )
    assert estimate_advantages(load_mine("ones", tmp_path), [group([1, 2])]) == [[[1], [1]]]
    assert load_mine("best", tmp_path) == PKPO(k=3)
    assert load_mine("PKPO", tmp_path) == PKPO()
    with pytest.raises(ConfigError, match=r"advantage: .*mine\.py:number is not a function of a group"):
        load_mine("number", tmp_path)


def test_one_advantage_an_episode_is_spread_over_its_turns() -> None:
    two_turns = episode(1.0, turns=[turn([1], [2]), turn([3], [4], parent=0)])
    played = group([1, 0])
    played = type(played)("env", "task", 0, (two_turns, played.episodes[1]))
    rows = advantages_by_turn(np.array([0.5, -0.5]), played, title="mine")
    assert [row.tolist() for row in rows] == [[0.5, 0.5], [-0.5]]


def test_a_failed_episode_is_never_trained_on_whatever_the_estimator_says() -> None:
    rows = advantages_by_turn(np.array([1.0, 1.0]), group([1.0, None]), title="mine")
    assert [row.tolist() for row in rows] == [[1.0], [0.0]]


def test_a_masked_episode_is_never_trained_on_whatever_the_estimator_says() -> None:
    two = episode(1.0, turns=[turn([1], [2]), turn([3], [4], parent=0)])
    played = Group("env", "task", 0, (replace(two, masked=True), replace(two, member=1)))
    for values in (np.array([0.5, -0.5]), [np.array([0.5, 0.5]), np.array([-0.5, -0.5])]):
        assert [row.tolist() for row in advantages_by_turn(values, played, title="mine")] == [[0.0, 0.0], [-0.5, -0.5]]
    (rows,) = estimate_advantages(as_estimator(lambda group: np.ones(2)), [played])
    assert [row.tolist() for row in rows] == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("advantages", [np.array([1.0]), np.array([np.nan, 0.0]), [np.ones(3), np.ones(1)]])
def test_malformed_advantages_are_an_error(advantages) -> None:
    with pytest.raises(EnvironmentFault):
        advantages_by_turn(advantages, group([1, 0]), title="mine")


def test_advantage_too_large_for_float32_is_an_error() -> None:
    with pytest.raises(EnvironmentFault, match=r"an advantage of -1e\+300 for a group of env, too large"):
        advantages_by_turn(np.array([1.0, -1e300]), group([1, 0]), title="mine")


MINE = """
import sys
import numpy as np
import torch

def nothing(group): pass
def number(group): return 1.0
def zero_dimensions(group): return np.array(1.0)
def mapping(group): return {0: 1.0, 1: 0.0}
def text(group): return "ab"
def words(group): return ["a", "b"]
def lazy(group): return (reward for reward in group.rewards)
async def later(group): return group.rewards
def few(group): return [1.0]
def many(group): return np.ones((2, 3))
def ragged(group): return [[1.0, 2.0], [1.0]]
def holes(group): return [1.0, None]
def imaginary(group): return np.array([1j, 2j])
def nan(group): return np.array([0.0, np.nan])
def infinite(group): return [np.inf, 0.0]
def graded(group): return [torch.ones(1, requires_grad=True), 0.0]
def raises(group): raise KeyError("mine")
def leaves(group): sys.exit(3)
class Own:
    def __call__(self, group): return None
own = Own()
tensor = lambda group: torch.tensor([1.0, -1.0])
"""

MUST = "it must return 2 numbers for the 2 episodes of a group of env, or as many arrays with a number for each turn"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", f"returned None: {MUST}"),
        ("number", f"returned a value of type float: {MUST}"),
        ("zero_dimensions", f"returned a value of type ndarray: {MUST}"),
        ("mapping", f"returned a value of type dict: {MUST}"),
        ("text", f"returned a value of type str: {MUST}"),
        ("words", f"returned a value of type str for episode 0: {MUST}"),
        ("lazy", f"returned a value of type generator: {MUST}"),
        ("later", f"returned a coroutine, as it is an async function: {MUST}"),
        ("few", f"returned 1 advantage: {MUST}"),
        ("many", f"returned 3 advantages for the 1 turn of episode 0: {MUST}"),
        ("ragged", f"returned 2 advantages for the 1 turn of episode 0: {MUST}"),
        ("holes", f"returned None for episode 1: {MUST}"),
        ("imaginary", f"returned a value of type complex128 for episode 0: {MUST}"),
        ("nan", f"returned nan for episode 1: {MUST}, all of them finite"),
        ("infinite", f"returned inf for episode 0: {MUST}, all of them finite"),
        ("graded", f"returned a value of type Tensor for episode 0: {MUST}"),
        ("raises", "failed on a group of env: KeyError: 'mine' at "),
        ("leaves", "failed on a group of env: SystemExit: 3 at "),
    ],
)
def test_error_of_a_custom_estimator_names_it_and_the_problem(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    mine = load_mine(name, tmp_path)
    with pytest.raises(EnvironmentFault) as failed:
        asyncio.run(Preparation({"env": mine}).prepare(group([0, 1])))
    line = str(failed.value)
    assert line.startswith(f"the advantage estimator {name} (mine.py:")
    assert message in line
    assert "\n" not in line
    # What a dry run makes of it has its name too.
    with pytest.raises(EnvironmentFault, match=rf"the advantage estimator {name} \(mine\.py:"):
        asyncio.run(Preparation({"env": NudgedEstimator(inner=mine)}).prepare(group([0, 1])))


def test_title_of_an_estimator_is_its_class_or_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with pytest.raises(EnvironmentFault, match="the advantage estimator Own returned None"):
        asyncio.run(Preparation({"env": load_mine("own", tmp_path)}).prepare(group([0, 1])))
    assert PKPO(k=2).title == "pkpo"
    assert NudgedEstimator(inner=BatchStd()).title == "batch_std"


def test_title_of_a_wrapped_function_is_its_own_name() -> None:
    def mine(groups: Sequence[Group], scale: float) -> list[np.ndarray]:
        return [np.full(len(group.episodes), scale) for group in groups]

    wrapped = as_estimator(step_estimator(partial(mine, scale=2.0)))
    assert wrapped.title.startswith("mine (test_advantages.py:")
    assert wrapped.needs_whole_steps
    assert not FunctionEstimator(function=mine).needs_whole_steps


def test_array_likes_are_advantages(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    estimates = estimate_advantages(load_mine("tensor", tmp_path), [group([0, 1])])
    assert [row.tolist() for row in estimates[0]] == [[1.0], [-1.0]]
    assert [row.tolist() for row in advantages_by_turn([True, 0], group([0, 1]), title="mine")] == [[1.0], [0.0]]


# What estimators report


@given(st.lists(st.integers(0, 6), max_size=10), st.sampled_from([0.1, math.log(2), 2.0]))
def test_temperature_search_is_saturated_if_it_cannot_reach_its_divergence(values: list[int], kl: float) -> None:
    metrics = estimate_metrics(EntropicAdaptive(kl=kl), group([float(value) for value in values]))
    if len(set(values)) < 2:
        assert not metrics
        return
    advantages = EntropicAdaptive(kl=kl, clip=1e300).advantages(group([float(value) for value in values]))
    weights = (advantages + 1) / (advantages + len(values))
    reached = sum(w * math.log(w * len(values)) for w in weights if w > 0)
    expected = min(kl, 0.9 * math.log(len(values)))
    if abs(reached - expected) < 1e-6 and math.log(len(values) / values.count(max(values))) == pytest.approx(expected):
        return  # at the limit itself rounding decides
    assert metrics == {"saturated": float(reached < expected * (1 - 1e-6))}


def test_separate_validity_searches_valid_episodes_only() -> None:
    played = group([0.0, 0.0, 0.0, 2.0, 2.0, 1.0, None])
    assert estimate_metrics(EntropicAdaptive(), played) == {"saturated": 0.0}
    assert estimate_metrics(EntropicValidAware(), played) == {"saturated": 1.0}
    assert estimate_metrics(NudgedEstimator(inner=EntropicValidAware()), played) == {"saturated": 1.0}
    assert estimate_metrics(EntropicValidAware(), group([0.0, 0.0])) == {}
    assert estimate_metrics(GroupMean(), played) == {}


def test_the_share_of_saturated_searches_is_a_metric_of_the_environment(tmp_path: Path) -> None:
    envs = {"words": {"advantage": "entropic_adaptive"}, "sums": {"env": "arithmetic"}}
    batch = {"groups": 6, "group_size": 5}
    run = Simulation(tmp_path / "run", settings={"steps": 3, "envs": envs, "batch": batch})
    run.train()
    episodes = pd.read_parquet(run.directory / "episodes")
    for line in run.lines():
        rows = episodes[(episodes.step == line["step"]) & episodes.final & (episodes.env == "words")]
        ties = [
            (len(rewards), int((rewards == rewards.max()).sum()))
            for _, rewards in rows.groupby("draw").reward
            if rewards.nunique() > 1
        ]
        shares = [best > n / 2 for n, best in ties]
        assert line["env/words/advantage/saturated"] == line["env/all/advantage/saturated"] == np.mean(shares)
        assert "env/sums/advantage/saturated" not in line


# Whole steps


def test_the_groups_of_a_step_are_estimated_together_by_environment() -> None:
    preparation = Preparation({"a": BatchStd(), "b": BatchStd(), "c": GroupMean()})
    groups = [group(values, env=env) for env, values in (("a", [0, 1]), ("b", [0, 9]), ("a", [5, 5]), ("c", [0, 8]))]
    separate = [asyncio.run(preparation.prepare(prepared)) for prepared in groups]
    together = preparation.prepare_step(separate)
    deviation = float(np.std([0, 1, 5, 5]))
    expected = [[-0.5 / deviation, 0.5 / deviation], [-1, 1], [0, 0], [-4, 4]]
    for prepared, values in zip(together, expected, strict=True):
        np.testing.assert_allclose(np.concatenate(prepared.advantages), values)
    assert (
        [len(prepared.data) for prepared in together] == [len(prepared.data) for prepared in separate] == [2, 2, 0, 2]
    )
    assert together[3] is separate[3]
    np.testing.assert_allclose(together[0].data[1].advantages.max(), 0.5 / deviation, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda groups: [np.zeros(2)] * 3,
            "returned advantages for 3 of 1 groups of env: it must return those of each",
        ),
        (
            lambda groups: None,
            "returned None for the groups of env: it must return those of each group of the step, 1 here",
        ),
        (lambda groups: [None], r"returned None: it must return 2 numbers for the 2 episodes of a group of env"),
        (lambda groups: [np.full(2, np.nan)], "returned nan for episode 0: .* all of them finite"),
        (lambda groups: 1 / 0, "failed on a group of env: ZeroDivisionError"),
    ],
)
def test_error_of_a_step_estimator_names_the_problem(function, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        asyncio.run(Preparation({"env": as_estimator(step_estimator(function))}).prepare(group([0, 1])))


def make_config(**settings: object) -> Config:
    return load_config([], settings={"envs": {"a": {"env": "arithmetic"}}, **settings}).config


@pytest.mark.parametrize("name", ["batch_std", "reinforce_pp_baseline"])
def test_stream_schedule_rejects_step_estimators(name: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = make_config(advantage=f"{tmp_path}/own.py:step", schedule={"mode": "stream"})
    with pytest.raises(
        ConfigError, match=r"envs\.a: the estimator step \(own\.py:\d+\) needs .* schedule\.mode to sync"
    ):
        load_estimators(config, {})
    with pytest.raises(ConfigError, match=rf"envs\.a: the estimator {name} needs"):
        load_estimators(make_config(schedule={"mode": "stream"}), {"a": ESTIMATORS[name]()})
    assert load_estimators(config, {"a": GroupMean()}) == {"a": GroupMean()}
    assert load_estimators(make_config(advantage=name), {}) == {"a": ESTIMATORS[name]()}


# Runs

SMALL = {"pkpo": {"name": "pkpo", "k": 2}}  # than the groups of these runs


class Spell(Word):
    """Rewards that are hardly ever equal, for estimators that have no scale where most are."""

    def grade(self, reply: rlkit.Reply) -> float:
        return float(sum(map(ord, reply.text)) % 97)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_learns_with_every_estimator(name: str, mode: str, tmp_path: Path) -> None:
    settings = {"steps": 2, "advantage": SMALL.get(name, name), "schedule": {"mode": mode}}
    run = Simulation(tmp_path / "run", settings=settings, tasks=[Spell(number) for number in range(9)])
    assert run.train().status == "completed"
    assert [line["optim/skipped"] for line in run.lines()] == [0, 0]


def test_configured_beta_reaches_the_entropic_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared_groups, prepare = list[tuple[Group, PreparedGroup]](), Preparation.prepare

    async def record_group(self: Preparation, played: Group, *more: Any) -> PreparedGroup:
        prepared_groups.append((played, await prepare(self, played, *more)))
        return prepared_groups[-1][1]

    monkeypatch.setattr(Preparation, "prepare", record_group)
    for beta in (0.5, 2.0):
        prepared_groups.clear()
        settings = {"steps": 2, "advantage": {"name": "entropic", "beta": beta}}
        Simulation(tmp_path / str(beta), settings=settings).train()
        assert any(len(set(played.rewards)) > 1 for played, _ in prepared_groups)
        for played, prepared in prepared_groups:
            weights = np.exp(beta * played.rewards)
            mean_others = (weights.sum() - weights) / (len(weights) - 1)
            assert [float(row[0]) for row in prepared.advantages] == pytest.approx(
                np.minimum(weights / mean_others - 1, 16)
            )


def test_run_with_several_turns_learns_from_turn_returns(tmp_path: Path) -> None:
    settings = {"steps": 2, "advantage": {"name": "turn_returns", "discount": 0.5}}
    run = Simulation(tmp_path / "run", settings=settings, tasks=[Talk(number) for number in range(9)])
    assert run.train().status == "completed"
    other = Simulation(tmp_path / "other", settings={"steps": 2}, tasks=[Talk(number) for number in range(9)])
    other.train()
    assert run.weights()[0] != other.weights()[0]


OWN = """
import numpy as np
import rlkit

seen = {"each": set(), "steps": []}

def each(group):
    seen["each"].add(group.env)
    return np.nan_to_num(group.rewards - np.nanmean(group.rewards))

@rlkit.step_estimator
def step(groups):
    seen["steps"].append([group.env for group in groups])
    return [np.nan_to_num(group.rewards - np.nanmean(group.rewards)) for group in groups]
"""


def test_each_environment_has_its_own_estimator(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    envs = {
        "words": {"advantage": f"{tmp_path}/own.py:step"},
        "sums": {"env": "arithmetic", "advantage": f"{tmp_path}/own.py:each"},
        "more": {"env": "arithmetic"},
    }
    batch = {"groups": 6, "group_size": 3, "substeps": 2}
    run = Simulation(tmp_path / "run", settings={"steps": 2, "envs": envs, "batch": batch, "advantage": "grpo"})
    assert run.train().status == "completed"
    seen_envs = load_object(f"{tmp_path}/own.py:seen", field="seen")
    assert isinstance(seen_envs, dict)
    assert seen_envs["each"] == {"sums"}
    assert {env for groups in seen_envs["steps"] for env in groups} == {"words"}
    assert max(len(groups) for groups in seen_envs["steps"]) > 1


def test_resumed_run_with_a_step_estimator_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = {"steps": 4, "advantage": "batch_std", "batch": {"groups": 4, "group_size": 3, "substeps": 2}}
    expected = Simulation(tmp_path / "whole", settings=settings)
    expected.train()
    run = Simulation(tmp_path / "run", settings=settings)
    run.train_until(expected.virtual_s * 0.6)
    assert len(run.lines()) < 4
    run.train(resume=True)
    assert run.weights() == expected.weights()


def test_failing_step_estimator_ends_the_run_and_is_named(tmp_path: Path) -> None:
    def broken(groups: Sequence[Group]) -> list[np.ndarray]:
        if len(groups) > 1:
            raise KeyError("mine")
        return [np.array([1.0, 0.0, -1.0])]

    run = Simulation(tmp_path / "run", settings={"steps": 2}, estimators={"words": step_estimator(broken)})
    with pytest.raises(
        rlkit.EnvironmentFault, match=r"estimator broken \(.*\) failed on a group of words: KeyError: 'mine'"
    ):
        run.train()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_failed_calls_do_not_change_the_groups_of_a_step(mode: str, tmp_path: Path) -> None:
    schedule = {"mode": "async", "staleness": "strict"} if mode == "async" else {}
    batch = {"groups": 4, "group_size": 3, "substeps": 2}
    settings = {"advantage": "reinforce_pp_baseline", "batch": batch, "schedule": schedule}
    expected = Simulation(tmp_path / "whole", settings=settings)
    expected.train()
    calls = sum(expected.world.calls[call] for call in ("load", "sample", "gradient", "step", "save"))
    for number in range(2, calls + 1, 3):
        world = World(faults=[Fault("broken", call_number=number)])
        run = Simulation(tmp_path / f"{number}", world, settings=settings)
        assert run.train().status == "completed"
        assert run.weights() == expected.weights(), number


def test_estimator_in_python_is_a_function_a_name_or_a_mapping() -> None:
    tasks = [Spell(0)]
    with pytest.raises(
        rlkit.UsageError, match="advantage: expected a name such as grpo, a mapping with a name, or a function"
    ):
        rlkit.train(envs=tasks, advantage=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loss: expected a name such as ppo, a mapping with a name, or a function"):
        rlkit.train(envs=tasks, loss=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^loss: object is no setting: "):
        rlkit.train(envs=tasks, loss=object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"advantage\.betta: is not a field of entropic"):
        rlkit.train(envs=tasks, advantage={"name": "entropic", "betta": 1})
    with pytest.raises(ConfigError, match=r"found 'grop'\. Did you mean 'grpo'"):
        rlkit.train(envs=tasks, advantage="grop")
    with pytest.raises(ConfigError, match=r"set schedule\.mode to sync"):
        rlkit.train(envs=tasks, advantage=step_estimator(BatchStd().step_advantages), schedule={"mode": "stream"})


@pytest.mark.parametrize(
    ("rewards", "returned", "message"),
    [
        ([1.0], [1.0, 2.0], "2 advantages: it must return 1 number for the 1 episode of a group of env, or as many"),
        ([1.0, 0.0], [1.0], "1 advantage: it must return 2 numbers for the 2 episodes of a group of env, or as many"),
        ([1.0, 0.0], [[1.0], [1.0, 2.0]], "2 advantages for the 1 turn of episode 1: it must return 2 numbers"),
        ([1.0, 0.0], [1.0, float("nan")], "nan for episode 1: .*, all of them finite"),
        ([1.0, 0.0], [float("-inf"), 1.0], "-inf for episode 0: .*, all of them finite"),
        ([1.0, 0.0], [1.0, "two"], "a value of type str for episode 1: "),
    ],
)
def test_error_states_how_many_advantages_are_expected(rewards: list[float], returned: object, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=f"the advantage estimator mine returned (an? )?{message}"):
        advantages_by_turn(returned, group(rewards), title="mine")


@pytest.mark.parametrize("largest", [3.4e38, -3.4e38])
def test_largest_float32_advantage_is_accepted(largest: float) -> None:
    assert [row.tolist() for row in advantages_by_turn([largest, 0.0], group([1, 0]), title="mine")] == [
        [largest],
        [0.0],
    ]


def test_error_names_the_line_at_which_the_estimator_failed() -> None:
    def broken(group: Group) -> np.ndarray:
        return np.array([1.0]) / group.no_such_thing  # type: ignore[attr-defined]  on purpose

    place = f"{Path(__file__).name}:{broken.__code__.co_firstlineno + 1}"
    with pytest.raises(EnvironmentFault, match=rf"AttributeError: .* at .*{place}$"):
        estimate_advantages(as_estimator(broken), [group([1, 0])])
