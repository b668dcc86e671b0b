"""Settings without effect are errors: defaults that nothing inherits, and settings that contradict others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlkit.config.loading.load import load_config
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
def test_default_that_no_environment_inherits_is_an_error(section: str, name: str, value: float) -> None:
    settings: dict[str, object] = {"envs": {"arithmetic": {name: OWN[name]}}, section: {name: value}}
    with pytest.raises(ConfigError, match=f"{section}.{name}: has no effect, because every environment sets its own"):
        load_config([], settings=settings)
    inherited = settings | {"envs": {"arithmetic": {name: OWN[name]}, "other": {"env": "arithmetic"}}}
    assert load_config([], settings=inherited)


def test_min_valid_that_every_environment_overrides_is_an_error() -> None:
    envs: dict[str, object] = {"arithmetic": {"max_failing_rollouts": 2}, "b": {"env": "arithmetic", "min_valid": 3}}
    message = (
        r"rollouts\.min_valid: has no effect, because every environment sets its own min_valid or max_failing_rollouts"
    )
    assert_rejected(message, envs=envs, rollouts={"min_valid": 4})
    inherited = envs | {"c": {"env": "arithmetic"}}
    assert load_config([], settings={"envs": inherited, "rollouts": {"min_valid": 4}})


@pytest.mark.parametrize("name", ["timeout_s", "max_retries"])
def test_default_that_an_evaluation_inherits_is_accepted(name: str) -> None:
    settings: dict[str, object] = {
        "envs": {"arithmetic": {name: OWN[name]}},
        "rollouts": {name: 3},
        "eval": {"envs": {"arithmetic": {}}},
    }
    assert load_config([], settings=settings)


def test_group_that_can_never_be_valid_is_an_error() -> None:
    for env_settings, message in (
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
        with pytest.raises(ConfigError, match=message):
            load_config([], settings={"envs": {"arithmetic": env_settings}})
    run: dict[str, object] = {"envs": {"arithmetic": {"group_size": 2, "min_valid": 1}, "b": {"env": "arithmetic"}}}
    assert load_config([], settings=run | {"rollouts": {"min_valid": 8}})


@pytest.mark.parametrize("settings", [{"envs": {"all": {}, "b": {}}}, {"eval": {"envs": {"all": {}}}}])
def test_environment_named_all_is_an_error(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"envs\.all: this name is reserved"):
        load_config([], settings={"envs": {"arithmetic": {}}} | settings)


def test_weight_of_a_single_environment_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"envs\.arithmetic\.weight: has no effect, because there is only one"):
        load_config([], settings={"envs": {"arithmetic": {"weight": 3.0}}})


@pytest.mark.parametrize("mode", ["sync", "stream"])
def test_keeping_weights_is_an_error_if_they_never_change_in_a_rollout(mode: str) -> None:
    settings = {"envs": {"arithmetic": {"newest_weights": False}}, "schedule": {"mode": mode}}
    with pytest.raises(ConfigError, match=r"envs\.arithmetic\.newest_weights: has no effect"):
        load_config([], settings=settings)
    assert load_config([], settings=settings | {"schedule": {"mode": "async"}})


def assert_rejected(message: str, **settings: object) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config([], settings={"envs": {"arithmetic": {}}} | settings)


@pytest.mark.parametrize("name", ["batch_std", "reinforce_pp_baseline"])
def test_stream_schedule_with_a_step_estimator_is_an_error(name: str) -> None:
    assert_rejected(rf"python: advantage: the estimator {name} needs all", advantage=name, schedule={"mode": "stream"})
    envs = {"arithmetic": {"advantage": name}, "other": {"env": "arithmetic"}}
    assert_rejected(
        rf"envs\.arithmetic\.advantage: the estimator {name} needs all", envs=envs, schedule={"mode": "stream"}
    )
    assert load_config([], settings={"envs": envs, "schedule": {"mode": "async"}})


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (5, 4)])
def test_learning_rate_decay_without_steps_is_an_error(schedule: str, steps: int, warmup: int) -> None:
    optimizer = {"schedule": schedule, "warmup_steps": warmup}
    assert_rejected(rf"optimizer\.schedule: {schedule} has no effect", optimizer=optimizer, steps=steps)
    assert load_config([], settings={"envs": {"arithmetic": {}}, "optimizer": optimizer, "steps": steps + 1})


def test_step_that_the_service_would_reject_is_an_error() -> None:
    assert_rejected(
        r"optimizer\.learning_rate: expected at most 1000, the service's limit, found 1001",
        optimizer={"learning_rate": 1001},
    )
    assert_rejected(r"optimizer\.weight_decay: expected at most 1000, found 1001", optimizer={"weight_decay": 1001.0})
    assert load_config([], settings={"envs": {"arithmetic": {}}, "optimizer": {"learning_rate": 1000}})


EVALUATED = {"held_out": {"env": "arithmetic"}}


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("reward/mean", r"no step has a 'reward/mean'; names begin with env/, eval/.* Did you mean '.*/reward/mean'"),
        ("evals/all/reward/mean", r"Did you mean 'eval/all/reward/mean'\?"),
        ("optim/entropi", r"no step has a 'optim/entropi'\. Did you mean 'optim/entropy'\?"),
        ("optim/kl_sample_train", r"Did you mean 'optim/kl_sample_train_v[12]'\?"),
        ("batch/staleness", r"Did you mean 'batch/staleness/m(ax|ean)'\?"),
        ("time/step", r"Did you mean 'time/step_s'\?"),
        ("usage/dollars", r"Did you mean 'usage/usd'\?"),
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
def test_metric_that_no_step_has_is_an_error(metric: str, message: str) -> None:
    assert_rejected(rf"best\.metric: .*{message}", best={"metric": metric}, eval={"envs": EVALUATED})


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
def test_metric_that_a_step_may_have_is_accepted(metric: str) -> None:
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


def test_known_metric_names_are_the_documented_ones() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().partition("## Findings")[0]
    listed = {name for name in re.findall(r"`([a-z_]+/[^`]+)`", page) if not name.endswith("…")}
    of_a_step = {f"{of}/{name}" for of, names in STEP_METRICS.items() for name in names}
    assert {name for name in listed if name.partition("/")[0] in STEP_METRICS} == of_a_step
    of_episodes = {name.removeprefix("env/<name>/") for name in listed if name.startswith("env/<name>/")}
    assert of_episodes - {"pass_at_<k>", "<metric>", "teacher/<teacher>/kl"} == set(EPISODE_METRICS)


def test_rejected_configuration_leaves_no_run(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("envs: {arithmetic: {}}\nbest:\n  metric: optim/entropi\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:3: best\.metric: no step has"):
        load_config([tmp_path / "a.yaml"])
