from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlkit.config.loading.load import load_config
from rlkit.config.loading.nodes import Node, Origin, dotted, find, plain
from rlkit.config.loading.overrides import apply, split
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.errors import ConfigError
from tests.config.conftest import Load, Refused
from tests.config.strategies import KEYS, json_values

EMPTY = Node({}, Origin(""))
ENVS = "envs: {arithmetic: {}}\n"


@given(st.lists(KEYS, min_size=1, max_size=4), json_values())
def test_json_value_set_at_any_path_is_restored(keys: list[str], value: object) -> None:
    override = f"{dotted(tuple(keys))}={json.dumps(value)}"
    assert split(override)[0] == tuple(keys)
    node = find(apply(EMPTY, override), tuple(keys))
    assert node is not None
    assert plain(node) == value


def test_value_is_parsed_as_in_a_file(load: Load) -> None:
    resolved = load(
        ENVS, "sampling.stop=[a, b]", "checkpoint.ttl_days=null", "optimizer.learning_rate=1e-5", "name='7'"
    )
    assert resolved.config.sampling.stop == ["a", "b"]
    assert resolved.config.checkpoint.ttl_days is None
    assert resolved.config.optimizer.learning_rate == 1e-5
    assert resolved.config.name == "7"
    assert resolved.origins["sampling.stop.1"] == "command line"


def test_a_condition_is_a_text(load: Load) -> None:
    resolved = load(ENVS, "source.run=earlier", "source.reward=>= 0.5")
    assert resolved.config.source is not None
    assert resolved.config.source.reward == ">= 0.5"
    with pytest.raises(ConfigError, match=r"^command line: seed\.x: seed is a scalar"):
        load(ENVS + "seed: 1\n", "seed.x=>= 0.5")


def test_arguments_of_an_environment_are_set_one_by_one(load: Load) -> None:
    resolved = load("envs: {arithmetic: {args: {count: 3}}}", "envs.arithmetic.args.max_operand=99")
    assert resolved.config.envs["arithmetic"].args == {"count": 3, "max_operand": 99}


def test_one_item_of_a_list_is_replaced_or_appended(load: Load) -> None:
    text = f"{ENVS}sampling: {{stop: [a, b]}}"
    assert load(text, "sampling.stop.0=x").config.sampling.stop == ["x", "b"]
    assert load(text, "sampling.stop.2=x").config.sampling.stop == ["a", "b", "x"]
    assert load(ENVS, "sampling.stop.0=x").config.sampling.stop == ["x"]
    assert load(text, "sampling.stop.0=x").origins["sampling.stop.1"] == "a.yaml:2"


def test_quoted_key_may_contain_a_dot(load: Load) -> None:
    resolved = load(ENVS, 'envs."my.env".env=arithmetic', "envs.'my.env'.weight=2")
    assert resolved.config.envs["my.env"].weight == 2
    assert resolved.origins['envs."my.env".weight'] == "command line"


def test_an_equals_sign_may_be_part_of_the_value_and_of_a_quoted_key(load: Load) -> None:
    assert load(ENVS, "sampling.stop=[a=b]").config.sampling.stop == ["a=b"]
    args = load(ENVS, 'envs.arithmetic.args."a=b"=c').config.envs["arithmetic"].args
    assert args == {"a=b": "c"}


def test_mapping_is_merged_and_null_resets(load: Load) -> None:
    text = "envs: {a: {env: arithmetic}, b: {env: arithmetic}}\nsampling: {max_tokens: 5}"
    assert load(text, "sampling={top_k: 3}").config.sampling.max_tokens == 5
    assert load(text, "sampling=null").config.sampling.max_tokens == 256
    assert list(load(text, "envs=null", "envs.b.env=arithmetic").config.envs) == ["b"]


EVALUATED = """
envs: {arithmetic: {}, words: {env: arithmetic, weight: 2}}
eval: {envs: {small: {env: arithmetic, tasks: 5}, arithmetic: {tasks: 7}}}
track: {wandb: {project: mine}}
"""


@pytest.mark.parametrize(
    ("override", "evaluated"),
    [
        ("eval={}", {}),
        ("eval=null", {}),
        ("eval.envs={}", {}),
        ("eval.envs=null", {}),
        ("eval.envs.small=null", {"arithmetic": 7}),
        ("eval.envs.arithmetic=null", {"small": 5}),
        ("eval.envs.arithmetic={}", {"small": 5, "arithmetic": 100}),
        ("eval={envs: {small: null}}", {"arithmetic": 7}),
        ("eval={envs: {small: {tasks: 3}}}", {"small": 3, "arithmetic": 7}),
    ],
)
def test_null_and_an_empty_mapping_remove_evaluations(load: Load, override: str, evaluated: object) -> None:
    def counts(resolved: ResolvedConfig) -> dict[str, int]:
        return {name: env.tasks for name, env in resolved.config.eval.envs.items()}

    field, _, text = override.partition("=")
    section, *keys = field.split(".")
    inner: object = yaml.safe_load(text)
    for key in reversed(keys):
        inner = {key: inner}
    nested = {section: inner}
    Path("over.yaml").write_text(yaml.safe_dump(nested))
    assert counts(load(EVALUATED, override)) == evaluated, "on the command line"
    assert counts(load_config([Path("a.yaml"), Path("over.yaml")], environ={})) == evaluated, "in a later file"
    assert counts(load_config([Path("a.yaml")], settings=nested, environ={})) == evaluated, "in Python"


def test_null_and_an_empty_mapping_are_equal_for_training_environments(load: Load) -> None:
    assert list(load(EVALUATED, "envs.words=null").config.envs) == ["arithmetic"]
    assert load(EVALUATED, "envs.words={}", "envs.words.env=arithmetic").config.envs["words"].weight == 1
    emptied = load(EVALUATED, "track.wandb={}").config.track.wandb
    assert emptied is not None
    assert emptied.project is None or emptied.project != "mine"
    assert load(EVALUATED, "track.wandb=null").config.track.wandb is None


def test_environment_with_an_empty_value_has_its_defaults(load: Load) -> None:
    config = load("envs:\n  arithmetic:\neval:\n  envs:\n    arithmetic:\n").config
    assert (list(config.envs), list(config.eval.envs)) == (["arithmetic"], ["arithmetic"])
    assert list(load("envs:\n  arithmetic:\n  b: {env: arithmetic}\n", "envs.arithmetic=null").config.envs) == ["b"]


@pytest.mark.parametrize(
    ("text", "override", "expected"),
    [
        (EVALUATED, "eval.envs.smal=null", "eval.envs.smal: there is no such section to remove. Did you mean 'small'?"),
        (ENVS, "eval.envs.arithmetic=null", "eval.envs.arithmetic={} to add it with default settings"),
        (ENVS, "envs.arithmetic=null", "envs: name the environments to train on"),
        (f"{ENVS}eval: {{every: 5, envs: {{arithmetic: {{}}}}}}", "eval.envs.arithmetic=null", "(eval=null)"),
    ],
)
def test_invalid_removal_is_an_error_of_one_line(refused: Refused, text: str, override: str, expected: str) -> None:
    message = refused(text, override)
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps", "'steps' is not of the form path=value"),
        ("=3", "'=3' is not of the form path=value"),
        ("a..b=3", "is not of the form path=value"),
        (".a=3", "is not of the form path=value"),
        ('"a=3', "is not of the form path=value"),
        ("a." * 5000 + "b=1", "is not of the form path=value"),
        ("sampling.stop=[a", "sampling.stop: not valid YAML"),
        ("model.x=1", "model.x: model is a scalar (from a.yaml:2)"),
        (
            "rollouts.workers.memory_mb=300",
            "rollouts.workers.memory_mb: rollouts.workers is a scalar (from a.yaml:4), so it has no fields: "
            "write rollouts.workers={count: 2, memory_mb: …}",
        ),
        ("sampling.stop.7=x", "sampling.stop is a list: use an index from 0 to 1"),
        ("sampling.stop.x=x", "sampling.stop is a list: use an index from 0 to 1"),
        ("sampling.stop." + "9" * 5000 + "=x", "sampling.stop is a list"),
        ("stpes=3", "stpes: unknown field. Did you mean 'steps'?"),
        ("name=\ud800", "name: "),
    ],
)
def test_malformed_override_is_an_error_of_one_line(refused: Refused, override: str, expected: str) -> None:
    message = refused(f"{ENVS}model: m\nsampling: {{stop: [a]}}\nrollouts: {{workers: 2}}", override)
    assert message.startswith("command line: ")
    assert expected in message
    assert "\n" not in message
