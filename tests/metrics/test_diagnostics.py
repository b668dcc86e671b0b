from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.algorithms.datums import Preparation, UpdateResult
from rlkit.algorithms.estimators import GroupMean
from rlkit.algorithms.losses import PPO
from rlkit.metrics import diagnostics as module
from rlkit.metrics import env_reports
from rlkit.metrics.diagnostics import Finding, FindingMonitor, Line, find_problems
from rlkit.metrics.metrics import update_metrics
from rlkit.store.history import read_metrics
from tests.builders import group
from tests.simulation import Simulation, Word

HEALTHY = {
    "groups": 8.0,
    "episodes": 64.0,
    "failed": 1.0,
    "retries": 2.0,
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "groups/mixed": 0.7,
    "groups/all_good": 0.1,
    "groups/all_bad": 0.2,
    "stop/length": 0.05,
    "solved": 0.5,
    "solved_at_limit": 0.02,
    "truncated": 0.1,
    "turn_tokens/mean": 20.0,
    "retried/groups": 2.0,
    "retried/gap": 0.05,
}
OPTIM = {"optim/kl_sample_train_v1": 0.0004, "optim/kl_sample_train_v2": 0.0005, "optim/entropy": 0.6}


def make_line(step: int, **changed: float) -> Line:
    """A healthy step; a name with __ for / changes a number of the environment `sums`, or the one of that name."""
    overrides = {name.replace("__", "/"): value for name, value in changed.items()}
    env_metrics = HEALTHY | {name: value for name, value in overrides.items() if name in HEALTHY}
    metrics = {f"env/{env}/{name}": value for env in ("sums", "all") for name, value in env_metrics.items()}
    metrics |= OPTIM | {name: value for name, value in overrides.items() if name not in HEALTHY}
    return step, metrics


def make_lines(count: int, changed: Callable[[int], Mapping[str, float]] = lambda step: {}) -> list[Line]:
    return [make_line(step, **changed(step)) for step in range(1, count + 1)]


def assert_single_finding(findings: list[Finding], name: str, env: str = "sums") -> Finding:
    (finding,) = findings
    assert (finding.name, finding.env) == (name, env)
    assert finding.action
    return finding


def make_evaluation(step: int, reward: float) -> dict[str, float]:
    return {"eval__all__reward__mean": reward, "eval__all__reward__std": 0.4, "eval__all__groups": 400.0}


@pytest.mark.parametrize(
    ("name", "changed", "evidence", "action"),
    [
        (
            "dead_groups",
            {"groups__mixed": 0.1, "groups__all_good": 0.7, "groups__all_bad": 0.2},
            "in steps 16 to 25, the rewards differ in 10% of the groups, all are 1 or more in 70%, "
            "all are equal and below 1 in 20%",
            "harder",
        ),
        (
            "solved",
            {"groups__mixed": 0.1, "groups__all_good": 0.9, "groups__all_bad": 0.0, "reward__mean": 0.97},
            "in steps 16 to 25, 90% of the groups solved their task in each episode; mean reward 0.97",
            "stop here",
        ),
        (
            "dead_groups",
            {"groups__mixed": 0.1, "groups__all_good": 0.0, "groups__all_bad": 0.9},
            "of the groups, all are equal and below 1 in 90%",
            "easier",
        ),
        ("truncation", {"stop__length": 0.3}, "in steps 16 to 25, 30% of the turns", "envs.sums.max_tokens"),
        (
            "truncation",
            {"stop__length": 0.8, "solved": 0.5, "solved_at_limit": 0.1},
            "80% of the turns",
            "envs.sums.max_tokens",
        ),
        ("truncation", {"stop__length": 1.0, "solved": 0.0, "solved_at_limit": 0.0}, "100% of the turns", "max_tokens"),
        ("truncation", {"truncated": 0.3}, "in steps 16 to 25, 30% of the episodes", "envs.sums.max_turns"),
        ("infrastructure_failures", {"retries": 10.0}, "in steps 16 to 25, 110 of 740 rollouts failed", "`error`"),
        (
            "retry_bias",
            {"retried__gap": 0.5},
            "in 50 groups of steps 1 to 25, retried episodes got 0.5 more reward than the others, 6.2 standard",
            "side effects",
        ),
        ("retry_bias", {"retried__gap": -0.5}, "got 0.5 less reward than the others", "side effects"),
    ],
)
def test_problem_of_an_environment_is_found(name: str, changed: dict[str, float], evidence: str, action: str) -> None:
    finding = assert_single_finding(find_problems(make_lines(25, lambda step: changed)), name)
    assert evidence in finding.evidence
    assert action in finding.action
    assert finding.last == 25
    assert str(finding).startswith(f"{name} in sums: ")


@pytest.mark.parametrize(
    "changed",
    [
        {"groups__mixed": 0.21},
        {"time__env_busy": 0.49},
        {"time__env_busy": 0.89, "workers__live": 2.0},
        {
            "groups__mixed": 0.0,
            "episodes": 8.0,
            "failed": 0.0,
            "retries": 0.0,
        },  # groups of one, with a loss of one's own
        {"stop__length": 0.19, "truncated": 0.19},
        {"retries": 5.0},
        {"retried__gap": 0.3},
        {"retried__gap": 0.5, "retried__groups": 0.5},
        {"optim__entropy": 0.01},  # from the beginning
        {"optim__kl_sample_train_v2": 0.01},
        {"eval__all__reward__mean": 0.1, "eval__all__reward__std": 0.4, "eval__all__groups": 400.0},
    ],
)
def test_metrics_within_bounds_are_no_finding(changed: dict[str, float]) -> None:
    assert find_problems(make_lines(25, lambda step: changed)) == []


@pytest.mark.parametrize(
    ("changed", "evidence", "action"),
    [
        ({"time__env_busy": 0.7}, "ran for 70% of the time, in the run's process", "set rollouts.workers to auto"),
        ({"time__env_busy": 0.95, "workers__live": 2.0}, "2 workers were busy for 95% of the time", "add processors"),
    ],
)
def test_a_run_that_waits_for_its_environments_is_found(changed: dict[str, float], evidence: str, action: str) -> None:
    finding = assert_single_finding(find_problems(make_lines(25, lambda step: changed)), "environment_cpu", "all")
    assert evidence in finding.evidence
    assert action in finding.action


def test_every_finding_is_on_the_page() -> None:
    page = (Path(__file__).parents[1].parent / "docs" / "metrics.md").read_text().partition("## Findings")[2]
    rules = re.findall(r"^def _(\w+)\(history: _History", inspect.getsource(module), re.MULTILINE)
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted([*rules, env_reports.RULE])
    assert len(rules) == 10


def test_one_odd_step_is_no_finding() -> None:
    odd = {"groups__mixed": 0.0, "stop__length": 1.0, "retries": 50.0, "optim__entropy": 0.0}
    assert (
        find_problems(make_lines(30, lambda step: odd | {"optim__kl_sample_train_v2": 0.09} if step == 20 else {}))
        == []
    )


def test_finding_records_its_first_and_last_step() -> None:
    finding = assert_single_finding(
        find_problems(make_lines(60, lambda step: {"stop__length": 0.9} if 20 < step <= 30 else {})), "truncation"
    )
    assert (finding.first, finding.last) == (22, 38)


def test_replies_that_are_solved_before_the_limit_ends_them_are_no_finding() -> None:
    by_design = {"stop__length": 1.0, "solved": 0.3, "solved_at_limit": 0.3}
    assert find_problems(make_lines(25, lambda step: by_design)) == []


def test_replies_of_one_token_are_no_finding() -> None:
    by_design = {"stop__length": 1.0, "solved": 0.0, "solved_at_limit": 0.0, "turn_tokens__mean": 1.0}
    assert find_problems(make_lines(25, lambda step: by_design)) == []


def test_low_entropy_of_a_solved_task_is_no_finding() -> None:
    solved = {"groups__mixed": 0.3, "groups__all_good": 0.7, "groups__all_bad": 0.0}
    assert find_problems(make_lines(40, lambda step: {"optim__entropy": 0.6 * 0.93**step, **solved})) == []
    assert find_problems(make_lines(40, lambda step: {"optim__entropy": 0.04 * 0.93**step})) == []


@pytest.mark.parametrize("every", [1, 5])
def test_an_evaluation_that_is_only_noisy_does_not_diverge(every: int) -> None:
    false = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)

        def rising(step: int, rng: np.random.Generator = rng) -> dict[str, float]:
            measured = make_evaluation(step, 0.5 + rng.normal(0, 0.02)) if step % every == 0 else {}
            return {"reward__mean": 0.2 + step / 150, **measured}

        false += bool(find_problems(make_lines(100, rising)))
    assert false <= 3


def test_entropy_that_collapses_is_found() -> None:
    finding = assert_single_finding(
        find_problems(make_lines(40, lambda step: {"optim__entropy": 0.6 * 0.93**step})), "entropy_collapse", "all"
    )
    assert "after 0.483 in steps 1 to 5" in finding.evidence
    assert find_problems(make_lines(40, lambda step: {"optim__entropy": 0.6 * 0.97**step})) == []


def test_a_kl_that_grows_is_found_and_one_that_is_rounding_is_not() -> None:
    grown = find_problems(make_lines(30, lambda step: {"optim__kl_sample_train_v2": 0.001 * 1.07**step}))
    assert "after 0.0012 in steps 1 to 5" in assert_single_finding(grown, "sampler_trainer_kl", "all").evidence
    assert "learning rate" in grown[0].action
    tiny = {"optim__kl_sample_train_v1": 1e-7}
    assert find_problems(make_lines(30, lambda step: tiny | {"optim__kl_sample_train_v2": 1e-6 * step})) == []


def test_large_kl_with_stale_weights_recommends_less_staleness() -> None:
    metrics = {"optim__kl_sample_train_v1": -0.05, "batch__staleness__mean": 1.5}
    finding = assert_single_finding(find_problems(make_lines(5, lambda step: metrics)), "sampler_trainer_kl", "all")
    assert "0.05 nats a token; healthy runs stay below 0.01" in finding.evidence
    assert finding.action == "reduce schedule.max_staleness"


def test_an_evaluation_that_falls_while_the_reward_rises_is_found() -> None:
    def diverging(step: int) -> dict[str, float]:
        rewards = {"reward__mean": 0.3 + step / 100}
        return rewards | make_evaluation(step, 0.5 - abs(step - 10) / 50) if step % 5 == 0 else rewards

    finding = assert_single_finding(find_problems(make_lines(30, diverging)), "evaluation_diverges", "all")
    assert finding.evidence.startswith("the evaluation fell from 0.5 in step 10 to 0.1 in step 30, while the reward")
    assert "step 10" in finding.action
    rising = make_lines(30, lambda step: {"reward__mean": 0.3 + step / 100} | make_evaluation(step, 0.5 + step / 100))
    assert find_problems(rising) == []
    both = make_lines(30, lambda step: {"reward__mean": 0.6 - step / 100} | make_evaluation(step, 0.5 - step / 100))
    assert find_problems(both) == []


def test_an_evaluation_that_falls_from_the_beginning_is_found() -> None:
    before = {f"eval/all/{name}": value for name, value in (("reward/mean", 0.5), ("reward/std", 0.4), ("groups", 400))}
    after = make_lines(30, lambda step: {"reward__mean": 0.3 + step / 100} | make_evaluation(step, 0.35))
    assert (
        "in step 0"
        in assert_single_finding(find_problems([(0, before), *after]), "evaluation_diverges", "all").evidence
    )


SHARE = st.floats(0, 0.19)


@given(
    st.integers(0, 150),
    st.fixed_dictionaries(
        {
            "groups__mixed": st.floats(0.2, 1),
            "stop__length": SHARE,
            "truncated": SHARE,
            "failed": st.floats(0, 3),
            "retries": st.floats(0, 3),
            "reward__mean": st.floats(-1e6, 1e6),
            "retried__gap": st.floats(-0.1, 0.1),
            "optim__entropy": st.floats(0, 10),
            "optim__kl_sample_train_v1": st.floats(-0.009, 0.009),
            "optim__kl_sample_train_v2": st.floats(0, 0.009),
            "eval__all__reward__mean": st.floats(-1e6, 1e6),
            "eval__all__reward__std": st.floats(0, 1e6),
            "eval__all__groups": st.floats(1, 100),
        }
    ),
)
def test_constant_healthy_run_has_no_findings(count: int, metrics: dict[str, float]) -> None:
    assert find_problems(make_lines(count, lambda step: metrics)) == []


KEYS = [*make_line(1)[1], "eval/all/reward/mean", "eval/all/reward/std", "eval/all/groups", "batch/staleness/mean"]


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), st.floats()), max_size=30))
def test_any_metrics_give_each_finding_once(metrics: list[dict[str, float]]) -> None:
    monitor = FindingMonitor()
    findings = [finding for step, line in enumerate(metrics) for finding in monitor.add(step, line)]
    assert len({(finding.name, finding.env) for finding in findings}) == len(findings)
    every = find_problems(enumerate(metrics))
    expected = [(finding.name, finding.env, finding.first) for finding in every]
    assert [(finding.name, finding.env, finding.first) for finding in findings] == expected
    assert all(finding.first <= finding.last and finding.evidence and finding.action for finding in every)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf, None])
def test_single_non_finite_kl_is_found(kl: float | None) -> None:
    trained = {"optim__tokens": 100.0}
    broken = make_lines(6, lambda step: trained)
    step, metrics = broken[3]
    without_kl = {key: value for key, value in metrics.items() if key != "optim/kl_sample_train_v1"}
    broken[3] = (step, without_kl if kl is None else {**without_kl, "optim/kl_sample_train_v1": kl})
    finding = assert_single_finding(find_problems(broken), "no_kl", "all")
    assert (finding.first, finding.last) == (4, 4)
    assert finding.evidence.startswith("in step 4, KL(sampler‖trainer) was not finite")
    assert find_problems(make_lines(6, lambda step: trained)) == []


@pytest.mark.parametrize(
    "trained", [[-math.inf, -1.0], [math.nan, -1.0], [-math.inf, -math.inf], [math.inf, -math.inf]]
)
def test_non_finite_trainer_logprob_is_found(trained: list[float]) -> None:
    played = group([1.0, 0.0])
    prepared = asyncio.run(Preparation({"env": GroupMean()}).prepare(played))
    rows = [np.full(len(datum.targets), value, np.float32) for datum, value in zip(prepared.data, trained, strict=True)]
    update = UpdateResult([prepared], rows, {}, PPO(), 1e-4)
    assert [finding.name for finding in find_problems([(1, update_metrics(update))])] == ["no_kl"]


class Same(Word):
    """Give every reply the reward 0, and fail on some."""

    def grade(self, reply: rlkit.Reply) -> float:
        if sum(map(ord, reply.text)) % 4 == 0:
            raise ValueError("broken")
        return 0.0


def test_run_notes_each_finding_once_and_its_metrics_give_the_same(tmp_path: Path) -> None:
    settings = {"steps": 8, "sampling": {"max_tokens": 10}, "batch": {"groups": 2, "group_size": 3}}
    run = Simulation(tmp_path / "ill", settings=settings, tasks=[Same(number) for number in range(80)])
    run.train()
    findings = find_problems(read_metrics(run.directory / "metrics.jsonl"))
    assert {finding.name for finding in findings} == {"dead_groups", "truncation", "infrastructure_failures"}
    notes = [note for note in run.ears.notes if " in words: " in note]
    assert [note.split(" in ")[0] for note in notes] == [
        f"step {finding.first}: {finding.name}" for finding in findings
    ]
    run.settings = {**settings, "steps": 12}
    run.train(resume=True)
    assert [note for note in run.ears.notes if " in words: " in note] == notes


def test_healthy_run_has_no_finding_about_its_environment(tmp_path: Path) -> None:
    run = Simulation(tmp_path / "well", settings={"steps": 8}, tasks=[Word(number) for number in range(80)])
    run.train()
    # The simulated service makes up its log-probabilities, so sampler and trainer are far apart.
    assert {finding.name for finding in find_problems(read_metrics(run.directory / "metrics.jsonl"))} == {
        "sampler_trainer_kl"
    }
    assert len([note for note in run.ears.notes if "sampler_trainer_kl" in note]) == 1


def test_incomplete_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    path.write_text('{"step": 1, "a": 0.5, "b": null}\n{"step": 2, "a"')
    assert read_metrics(path) == [(1, {"a": 0.5})]
    path.write_text('{"a": 0.5}\n')
    with pytest.raises(rlkit.UsageError, match="has no step"):
        read_metrics(path)


def test_non_finite_numbers_are_no_evidence() -> None:
    assert (
        find_problems(make_lines(30, lambda step: {"stop__length": math.nan, "optim__kl_sample_train_v2": math.inf}))
        == []
    )


def test_equal_rewards_are_no_finding_if_a_teacher_trains_on_them(tmp_path: Path) -> None:
    tasks, batch = [Same(number) for number in range(80)], {"groups": 2, "group_size": 3}
    settings = {"steps": 8, "batch": batch, "teacher": {"checkpoint": "tinker://a/sampler_weights/b"}, "reward": "none"}
    run = Simulation(tmp_path / "taught", settings=settings, tasks=tasks)
    run.train()
    lines = read_metrics(run.directory / "metrics.jsonl")
    assert "dead_groups" not in {finding.name for finding in find_problems(lines)}
    untaught = [(step, {key: value for key, value in line.items() if "teacher" not in key}) for step, line in lines]
    assert "dead_groups" in {finding.name for finding in find_problems(untaught)}
    solved = {"env/words/groups/all_good": 1.0, "env/words/groups/all_bad": 0.0}
    assert "solved" not in {finding.name for finding in find_problems([(step, line | solved) for step, line in lines])}
    assert "solved" in {finding.name for finding in find_problems([(step, line | solved) for step, line in untaught])}
