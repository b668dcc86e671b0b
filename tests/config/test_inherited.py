"""What has no effect, or cannot be, is refused: what nobody inherits, and what other settings leave no room for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlkit.config import load_config
from rlkit.config.schema.metric_names import EPISODE_METRICS, STEP_METRICS
from rlkit.errors import ConfigError

OWN = {
    "group_size": 4,
    "temperature": 0.5,
    "max_tokens": 9,
    "timeout_s": 5.0,
    "max_retries": 1,
    "min_valid": 3,
}


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("batch", "group_size", 16),
        ("sampling", "temperature", 0.7),
        ("sampling", "max_tokens", 99),
        ("rollouts", "timeout_s", 60.0),
        ("rollouts", "max_retries", 0),
        ("rollouts", "min_valid", 4),
    ],
)
def test_a_default_that_nobody_inherits_is_refused(section: str, name: str, value: float) -> None:
    settings: dict[str, object] = {"envs": {"arithmetic": {name: OWN[name]}}, section: {name: value}}
    with pytest.raises(ConfigError, match=f"{section}.{name}: has no effect, because every environment sets its own"):
        load_config([], settings=settings)
    inherited = settings | {"envs": {"arithmetic": {name: OWN[name]}, "other": {"env": "arithmetic"}}}
    assert load_config([], settings=inherited)


def test_valid_episodes_that_every_environment_counts_from_the_other_side_are_refused() -> None:
    envs: dict[str, object] = {"arithmetic": {"max_failing_rollouts": 2}, "b": {"env": "arithmetic", "min_valid": 3}}
    told = (
        r"rollouts\.min_valid: has no effect, because every environment sets its own min_valid or max_failing_rollouts"
    )
    refused(told, envs=envs, rollouts={"min_valid": 4})
    inherited = envs | {"c": {"env": "arithmetic"}}
    assert load_config([], settings={"envs": inherited, "rollouts": {"min_valid": 4}})


@pytest.mark.parametrize("name", ["timeout_s", "max_retries"])
def test_a_default_that_an_evaluation_inherits_is_of_use(name: str) -> None:
    settings: dict[str, object] = {
        "envs": {"arithmetic": {name: OWN[name]}},
        "rollouts": {name: 3},
        "eval": {"envs": {"arithmetic": {}}},
    }
    assert load_config([], settings=settings)


def test_a_group_that_can_never_be_valid_is_refused() -> None:
    for own, told in (
        (
            {"min_valid": 9},
            r"envs\.arithmetic\.min_valid: 9 is more than the rollouts of a group of envs\.arithmetic; ",
        ),
        ({"min_valid": 3, "group_size": 2}, r"set it to 2 or less"),
        ({"min_valid": 3, "max_failing_rollouts": 1}, r"min_valid sets the same limit"),
        (
            {"max_failing_rollouts": 3, "group_size": 4},
            r"leaves 1 of 4 rollouts, but a group needs at least 2",
        ),
        (
            {"max_failing_rollouts": 1, "group_size": 1},
            r"a group needs at least 1; set it to 0",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            load_config([], settings={"envs": {"arithmetic": own}})
    run: dict[str, object] = {"envs": {"arithmetic": {"group_size": 2, "min_valid": 1}, "b": {"env": "arithmetic"}}}
    assert load_config([], settings=run | {"rollouts": {"min_valid": 8}})


@pytest.mark.parametrize("settings", [{"envs": {"all": {}, "b": {}}}, {"eval": {"envs": {"all": {}}}}])
def test_no_environment_has_the_name_of_all_of_them(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"envs\.all: this name is reserved"):
        load_config([], settings={"envs": {"arithmetic": {}}} | settings)


def test_the_weight_of_the_only_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"envs\.arithmetic\.weight: has no effect, because there is only one"):
        load_config([], settings={"envs": {"arithmetic": {"weight": 3.0}}})


@pytest.mark.parametrize("mode", ["sync", "stream"])
def test_weights_that_never_change_in_a_rollout_cannot_be_kept(mode: str) -> None:
    settings = {"envs": {"arithmetic": {"newest_weights": False}}, "schedule": {"mode": mode}}
    with pytest.raises(ConfigError, match=r"envs\.arithmetic\.newest_weights: has no effect"):
        load_config([], settings=settings)
    assert load_config([], settings=settings | {"schedule": {"mode": "async"}})


def refused(told: str, **settings: object) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config([], settings={"envs": {"arithmetic": {}}} | settings)


@pytest.mark.parametrize("name", ["batch_std", "reinforce_pp_baseline"])
def test_an_estimator_of_whole_steps_is_refused_before_anything_is_loaded(name: str) -> None:
    refused(rf"python: advantage: the estimator {name} needs all", advantage=name, schedule={"mode": "stream"})
    own = {"arithmetic": {"advantage": name}, "other": {"env": "arithmetic"}}
    refused(rf"envs\.arithmetic\.advantage: the estimator {name} needs all", envs=own, schedule={"mode": "stream"})
    assert load_config([], settings={"envs": own, "schedule": {"mode": "async"}})


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (5, 4)])
def test_a_rate_that_has_no_step_to_fall_in_is_refused(schedule: str, steps: int, warmup: int) -> None:
    optimizer = {"schedule": schedule, "warmup_steps": warmup}
    refused(rf"optimizer\.schedule: {schedule} has no effect", optimizer=optimizer, steps=steps)
    assert load_config([], settings={"envs": {"arithmetic": {}}, "optimizer": optimizer, "steps": steps + 1})


def test_a_step_that_the_service_refuses_is_refused_before_it() -> None:
    refused(
        r"optimizer\.learning_rate: expected at most 1000, the service's limit, found 1001",
        optimizer={"learning_rate": 1001},
    )
    refused(r"optimizer\.weight_decay: expected at most 1000, found 1001", optimizer={"weight_decay": 1001.0})
    assert load_config([], settings={"envs": {"arithmetic": {}}, "optimizer": {"learning_rate": 1000}})


EVALUATED = {"held_out": {"env": "arithmetic"}}


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ("reward/mean", r"no step has a 'reward/mean'; names begin with env/, eval/.* Did you mean '.*/reward/mean'"),
        ("evals/all/reward/mean", r"Did you mean 'eval/all/reward/mean'\?"),
        ("optim/entropi", r"no step has a 'optim/entropi'\. Did you mean 'optim/entropy'\?"),
        ("optim/kl_sample_train", r"Did you mean 'optim/kl_sample_train_v[12]'\?"),
        ("batch/staleness", r"Did you mean 'batch/staleness/m(ax|ean)'\?"),
        ("time/step", r"Did you mean 'time/step_s'\?"),
        ("usage/dollars", r"Did you mean 'usage/usd'\\?"),
        ("nonsense", r"no step has a 'nonsense'; names begin with"),
        ("service", r"no step has a 'service'"),
        ("env/odd/reward/mean", r"there is no environment 'odd' in envs$"),
        ("eval/arithmetic/reward/mean", r"there is no environment 'arithmetic' in eval\.envs$"),
        ("env/arithmetic", r"'env/arithmetic' is not a metric of an environment, such as env/arithmetic/reward/mean"),
        ("kl_reference/v1", r"no step has a 'kl_reference/v1': set kl_penalty\.coefficient"),
        ("batch/length_penalty", r"set length_penalty\.coefficient"),
        ("batch/clipped", r"set batch\.clip_advantages"),
        ("optim/ratio/clipped", r"the loss importance_sampling clips nothing"),
    ],
)
def test_a_metric_that_no_step_can_have_is_refused(metric: str, told: str) -> None:
    refused(rf"best\.metric: .*{told}", best={"metric": metric}, eval={"envs": EVALUATED})


@pytest.mark.parametrize(
    "metric",
    [
        "env/arithmetic/format_ok",
        "env/all/reward/shaped",
        "env/arithmetic/tasks/archive",
        "eval/held_out/pass_at_8",
        "eval/all/reward/stderr",
        "service/loss:sum",
        "optim/entropy",
        "kl_reference/v2",
        "batch/clipped",
        "batch/length_penalty",
        "optim/ratio/clipped",
    ],
)
def test_a_metric_that_a_step_may_have_is_not(metric: str) -> None:
    settings = {
        "envs": {"arithmetic": {}},
        "eval": {"envs": EVALUATED},
        "best": {"metric": metric},
        "kl_penalty": {"coefficient": 0.1},
        "length_penalty": {"coefficient": 0.1},
        "batch": {"clip_advantages": 1.0},
        "loss": {"name": "ppo"},
    }
    assert load_config([], settings=settings).config.best_metric == metric


def test_the_names_of_metrics_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().partition("## Findings")[0]
    listed = {name for name in re.findall(r"`([a-z_]+/[^`]+)`", page) if not name.endswith("…")}
    of_a_step = {f"{of}/{name}" for of, names in STEP_METRICS.items() for name in names}
    assert {name for name in listed if name.partition("/")[0] in STEP_METRICS} == of_a_step
    of_episodes = {name.removeprefix("env/<name>/") for name in listed if name.startswith("env/<name>/")}
    assert of_episodes - {"pass_at_<k>", "<metric>"} == set(EPISODE_METRICS)


def test_what_is_refused_is_refused_before_a_run_is_begun(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("envs: {arithmetic: {}}\nbest:\n  metric: optim/entropi\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:3: best\.metric: no step has"):
        load_config([tmp_path / "a.yaml"])
