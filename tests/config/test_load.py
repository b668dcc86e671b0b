from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlkit.algorithms.estimators import PKPO, Entropic, GroupMean
from rlkit.algorithms.losses import PPO
from rlkit.config.loading.foreign_names import ANSWERS, FOREIGN_NAMES, VALUE_ANSWERS
from rlkit.config.loading.load import load_config
from rlkit.config.loading.nodes import Node, Origin, from_python, leaves, merge, plain
from rlkit.config.loading.outline import field_paths
from rlkit.config.loading.resolved import ResolvedConfig, show_lines
from rlkit.config.loading.yaml_text import parse
from rlkit.config.schema import Config, EnvConfig
from rlkit.config.schema.objective import CustomAdvantage
from rlkit.errors import ConfigError
from tests.config.conftest import Load, Refused

ENVS = "envs: {arithmetic: {}}\n"

# Trees of one shape: every path is a mapping in all of them or in none. None is empty or null, which would forget.
TREES = st.fixed_dictionaries(
    {},
    optional={
        "a": st.integers() | st.lists(st.integers(), max_size=2),
        "b": st.dictionaries(st.sampled_from(["c", "d"]), st.text(max_size=3), min_size=1),
        "e": st.dictionaries(st.sampled_from(["x", "y"]), st.fixed_dictionaries({"z": st.integers()}), min_size=1),
    },
)


def make_nodes(value: object, source: str) -> Node:
    origin = Origin(source)
    if isinstance(value, dict):
        return Node({key: make_nodes(child, source) for key, child in value.items()}, origin)
    if isinstance(value, list):
        return Node([make_nodes(child, source) for child in value], origin)
    return Node(value, origin)


@given(TREES, TREES, TREES)
def test_merging_is_associative_idempotent_and_keeps_origins(a: object, b: object, c: object) -> None:
    first, second, third = make_nodes(a, "a"), make_nodes(b, "b"), make_nodes(c, "c")
    left, right = merge(merge(first, second), third), merge(first, merge(second, third))
    assert left == right
    assert merge(left, left) == left
    assert plain(merge(first, make_nodes({}, "b"))) == plain(first)


@given(TREES, st.sampled_from(["a", "b", "e"]), st.sampled_from([None, {}]))
def test_empty_mapping_and_null_replace_the_value_of_their_key(tree: dict, key: str, over: object) -> None:
    assert plain(merge(make_nodes(tree, "a"), make_nodes({key: over}, "b"))) == {**tree, key: over}


def test_environments_of_python_keep_their_configured_settings(folder: Path) -> None:
    (folder / "a.yaml").write_text("envs: {words: {group_size: 4}, other: {}}")
    config = load_config([Path("a.yaml")], envs=["words", "new"], environ={}).config
    assert {name: env.group_size for name, env in config.envs.items()} == {"words": 4, "other": None, "new": None}
    assert list(load_config([Path("a.yaml")], ["envs=null"], envs=["new"], environ={}).config.envs) == ["new"]
    assert list(load_config([], envs=["new"], environ={}).config.envs) == ["new"]


def test_later_files_override_earlier_ones_and_the_command_line_overrides_all(folder: Path) -> None:
    (folder / "base.yaml").write_text(f"{ENVS}steps: 1\nsampling:\n  max_tokens: 5\n  stop: [a, b]\n")
    (folder / "mine.yaml").write_text("steps: 2\nsampling:\n  stop: [c]\n")
    resolved = load_config([Path("base.yaml"), Path("mine.yaml")], ["steps=3"], environ={})
    assert (resolved.config.steps, resolved.config.sampling.max_tokens, resolved.config.sampling.stop) == (3, 5, ["c"])
    expected = {"steps": "command line", "sampling.max_tokens": "base.yaml:4", "sampling.stop.0": "mine.yaml:3"}
    assert resolved.origins.items() >= expected.items()
    assert resolved.origins["sampling.top_p"] == "default"


def test_each_name_of_another_trainer_leads_to_a_field() -> None:
    fields = {".".join(path) for path in field_paths()}
    assert set(FOREIGN_NAMES.values()) <= fields
    assert not (FOREIGN_NAMES.keys() | ANSWERS.keys()) & fields
    assert not FOREIGN_NAMES.keys() & ANSWERS.keys()
    assert {answer.partition("=")[0] for answer in VALUE_ANSWERS} <= fields


def test_the_name_of_a_loss_is_short_for_its_section(load: Load) -> None:
    assert load("envs: {arithmetic: {}}\nloss: ppo").config.loss == PPO()
    custom = load("envs: {arithmetic: {}}\nloss: package.module:reinforce").config.loss
    assert (custom.name, custom.function) == ("custom", "package.module:reinforce")  # type: ignore[attr-defined]


def test_empty_section_has_its_defaults(load: Load) -> None:
    resolved = load("envs:\n  arithmetic:\nsampling:\nloss: null\neval: {envs: null}\nservice: ~\n")
    assert resolved.config == Config(envs={"arithmetic": EnvConfig()})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch:\n  group_sizee: 3", "a.yaml:3: batch.group_sizee: unknown field. Did you mean 'group_size'?"),
        ("group_size: 4", "a.yaml:2: group_size: unknown field. Did you mean 'batch.group_size'?"),
        ("lr: 0.1", "a.yaml:2: lr: unknown field. Did you mean 'optimizer.learning_rate'?"),
        ("optimizer: {lr: 0.1}", "a.yaml:2: optimizer.lr: unknown field. Did you mean 'optimizer.learning_rate'?"),
        ("n_steps: 4", "a.yaml:2: n_steps: unknown field. Did you mean 'steps'?"),
        ("rollout: {n: 8}", "a.yaml:2: rollout: unknown field. Did you mean 'batch.group_size'?"),
        ("actor: {optim: {lr: 1}}", "a.yaml:2: actor: unknown field. Did you mean 'optimizer.learning_rate'?"),
        ("num_generations: 4", "a.yaml:2: num_generations: unknown field. Did you mean 'batch.group_size'?"),
        ("max_completion_length: 9", "unknown field. Did you mean 'sampling.max_tokens'?"),
        ("samplng: {max_tokens: 9}", "unknown field. Did you mean 'sampling'?"),
        ("warmup_steps: 9", "unknown field. Did you mean 'optimizer.warmup_steps'?"),
        ("max_turns: 9", "Did you mean 'envs.<name>.max_turns' or 'eval.envs.<name>.max_turns'?"),
        ("workers: 9", "unknown field. Did you mean 'rollouts.workers'?"),
        ("curriculum: filter", "unknown field. Did you mean 'envs.<name>.curriculum'?"),
        ("attempts: 9", "unknown field. Did you mean 'eval.envs.<name>.attempts'?"),
        ("lora_alpha: 9", "a.yaml:2: lora_alpha: unknown field. The service decides it; leave the field out"),
        ("optimizer: {gradient_accumulation_steps: 9}", "one gradient, that of its whole batch: set batch.groups"),
        ("actor_rollout_ref: {actor: {entropy_coeff: 1}}", "unknown field. Losses have no entropy bonus"),
        ("actor_rollout_ref: {model: {path: x}}", "unknown field. Did you mean 'model'?"),
        (
            "eval: {envs: {mine: {env: rows, prompt: x}}}",
            "unknown field. Write an argument of the environment as args: {prompt: …}",
        ),
        ("eval: {envs: {mine: {env: math, dataset: gsm8k}}}", "environment as args: {dataset: …}"),
        ("eval: {envs: {mine: {max_turn: 3}}}", "unknown field. Did you mean 'max_turns'?"),
        ("importance_sampling_level: sequence", "unknown field. Did you mean 'loss.name'?"),
        ("leraning_rate: 9", "Did you mean 'warm_start.learning_rate' or 'optimizer.learning_rate'?"),
        ('"data.train_batch_size": 9', "unknown field. Did you mean 'batch.groups'?"),
        ("batch_size: 9", "Did you mean 'batch.groups'? It counts tasks, with batch.group_size rollouts each."),
        ("max_tokens: 9", "unknown field. Did you mean 'sampling.max_tokens'?"),
        ("loss: pop", "expected importance_sampling, "),
        ("loss: pop", "found 'pop'. Did you mean 'ppo'?"),
        ("loss: grpo", "found 'grpo'. GRPO is an estimator: set advantage to grpo. Its loss is ppo"),
        ("advantage: {name: gae}", "found 'gae'. There is no value function"),
        ("batch.groups: 4", 'a.yaml:2: "batch.groups": unknown field. Write it as batch: {groups: …}'),
        ("zzz: 4", "a.yaml:2: zzz: unknown field. Known: model, name, "),
        ("steps: -5", "a.yaml:2: steps: expected at least 1, found -5"),
        ("steps: true", "a.yaml:2: steps: expected an integer, found true"),
        ("steps: '10'", "a.yaml:2: steps: expected an integer, found '10'"),
        ("steps: 1.0", "a.yaml:2: steps: expected an integer, found 1.0"),
        ("steps: null", "a.yaml:2: steps: both `steps` and `epochs` are null; set one of them"),
        ("lora: {train_mlp: yes}", "a.yaml:2: lora.train_mlp: expected true or false, found 'yes'"),
        ("sampling: 5", "a.yaml:2: sampling: expected a mapping, found 5"),
        ("sampling: {stop: a}", "a.yaml:2: sampling.stop: expected a list, found 'a'"),
        ("sampling:\n  stop:\n    - a\n    - 1", "a.yaml:5: sampling.stop.1: expected a string, found 1"),
        (
            "optimizer: {learning_rate: 0}",
            "a.yaml:2: optimizer.learning_rate: expected a number above 0, or auto, found 0",
        ),
        ("model: ''", "a.yaml:2: model: must not be empty"),
        ("name: a/b", "a.yaml:2: name: 'a/b' may contain only letters, digits"),
        (
            "loss: {name: pppo}",
            "found 'pppo'. Did you mean 'ppo'?",
        ),
        ("loss: pop", "a.yaml:2: loss.name: expected importance_sampling, "),
        ("loss: pop", "found 'pop'. Did you mean 'ppo'?"),
        ("schedule: async", "a.yaml:2: schedule.mode: is missing. Write schedule as {mode: async}"),
        ("loss: 5", "a.yaml:2: loss: expected a name such as ppo, a mapping with a name, or a function "),
        ("schedule: asnyc", "found 'asnyc'. Did you mean 'async'?"),
        ("loss: {clip_low: 0.5}", "a.yaml:2: loss.name: expected importance_sampling, "),
        (
            "loss: {name: importance_sampling, clip_low: 1}",
            "loss.clip_low: is not a field of importance_sampling, it belongs to ppo",
        ),
        ("loss: {name: ppo, clip_lo: 1}", "a.yaml:2: loss.clip_lo: is not a field of ppo. Did you mean 'clip_low'?"),
        ("loss: {name: ppo, clip_low: 2}", "a.yaml:2: loss.clip_low: expected at most 1, found 2"),
        ("lora: {train_attn: false, train_mlp: false}", "a.yaml:2: lora: no parameters are trained: set"),
        ("rollouts: {min_valid: 99}", "a.yaml:2: rollouts.min_valid: 99 is more than the rollouts of a group of envs."),
        (
            "batch: {groups: 3, substeps: 2}",
            "a.yaml:2: batch: substeps: 3 groups cannot be split equally into 2 substeps",
        ),
        ("batch: {group_size: 1}", "a.yaml:1: envs.arithmetic: a group of 1 has no baseline"),
        ("load_checkpoint: here", "a.yaml:2: load_checkpoint: 'here' is not a path of the form tinker://"),
        (
            "load_checkpoint: tinker://a/sampler_weights/b",
            "load_checkpoint: 'tinker://a/sampler_weights/b' is not a path of the form tinker://…/weights/…",
        ),
        (
            "kl_penalty: {coefficient: 1, reference: tinker://a/weights/b}",
            "reference: 'tinker://a/weights/b' is neither base nor a path of the form tinker://…/sampler_weights/…",
        ),
        ("eval: {every: 3}", "a.yaml:2: eval: `every` has no effect"),
        ("service: {base_url: 'http://x', engine_threads: 2}", "a.yaml:2: service: engine_threads has no effect"),
        ("advantage: grop", "a.yaml:2: advantage.name: expected group_mean, "),
        ("advantage: grop", "found 'grop'. Did you mean 'grpo'?"),
        (
            "advantage: {name: entropic, betta: 1}",
            "a.yaml:2: advantage.betta: is not a field of entropic. Did you mean 'beta'",
        ),
        ("advantage: {name: grpo, k: 1}", "a.yaml:2: advantage.k: is not a field of grpo, it belongs to pkpo"),
        ("advantage: {name: entropic, beta: 0}", "a.yaml:2: advantage.beta: expected a value above 0, found 0"),
        ("advantage: {name: pkpo, k: 1}", "a.yaml:2: advantage.k: expected at least 2, found 1"),
        ("advantage: {name: quantile, level: 1}", "a.yaml:2: advantage.level: expected a value below 1, found 1"),
        ("advantage: {name: turn_returns, discount: 2}", "a.yaml:2: advantage.discount: expected at most 1, found 2"),
        ("advantage: {beta: 2}", "a.yaml:2: advantage.name: expected group_mean, "),
        ("advantage: 5", "a.yaml:2: advantage: expected a name such as grpo, a mapping with a name, or a function "),
        ("advantage: {name: pkpo, k: 9}", "a.yaml:1: envs.arithmetic: pkpo cannot take the best of 9 in a group of 8"),
        ("advantage: nope.py:mine", "a.yaml:2: advantage.function: there is no file 'nope.py'"),
        ("optimizer: {learning_rate: fast}", "learning_rate: expected a number above 0, or auto, found 'fast'"),
        (
            "optimizer: {final_fraction: 0.1}",
            "a.yaml:2: optimizer: final_fraction has no effect: set schedule to linear",
        ),
        (
            "optimizer: {warmup_steps: 100}",
            "optimizer.warmup_steps: the run ends after 100 steps, before the full learning rate",
        ),
        ("loss: {name: stable_reinforce}", "loss: stable_reinforce is not supported: it needs data"),
        (
            "loss: {name: cross_entropy}",
            "loss: cross_entropy is for the conversations of source and warm_start, and not for arithmetic",
        ),
        ("loss: {name: cispo, beta: 1}", "loss.beta: is not a field of cispo, it belongs to dro"),
        ("batch: {normalize: token}\nloss: {name: dro}", "a.yaml:2: batch.normalize: dro is not linear"),
        ("batch: {normalize_tokens: 9}", "batch: normalize_tokens has no effect: set normalize to constant"),
        ("batch: {clip_advantages: 0}", "batch.clip_advantages: expected a value above 0, found 0"),
        ("kl_penalty: {discount: 0.5}", "kl_penalty: discount has no effect: set coefficient above 0"),
        ("kl_penalty: {coefficient: 1, reference: x}", "kl_penalty: reference: 'x' is neither base nor a path"),
        ("length_penalty: {to_tokens: 5}", "length_penalty: to_tokens has no effect: set coefficient above 0"),
        (
            "length_penalty: {coefficient: 1, from_tokens: 256}",
            "a.yaml:2: length_penalty.from_tokens: 256 must be below the 256 tokens at which the penalty of envs.arith",
        ),
        (
            "rollouts: {workers: {runner: ray, count: 0}}",
            "a.yaml:2: rollouts.workers: runner has no effect: remove it, or set count; 0 plays in the run's own",
        ),
        ("rollouts: {workers: {cpus: 2, count: 0}}", "a.yaml:2: rollouts.workers: cpus has no effect: remove it, or"),
        ('"a\\nb": 1', 'a.yaml:2: "a\\nb": unknown field'),
    ],
)
def test_mistake_is_one_line_with_its_place_and_a_fix(refused: Refused, text: str, expected: str) -> None:
    message = refused(ENVS + text)
    assert message.startswith(expected) or expected in message
    assert "\n" not in message
    assert "Value error" not in message


def test_a_group_cannot_need_more_episodes_than_it_has(load: Load, refused: Refused) -> None:
    envs = "envs: {arithmetic: {}, pairs: {env: arithmetic, group_size: 2}}\n"
    assert refused(envs + "rollouts: {min_valid: 3}").endswith("a group of envs.pairs; set it to 2 or less")
    load(envs + "rollouts: {min_valid: 2}")
    load("envs: {arithmetic: {group_size: 12}}\nrollouts: {min_valid: 12}")


def test_bare_name_selects_an_estimator_with_defaults(load: Load) -> None:
    short, long = load(f"{ENVS}advantage: entropic"), load(f"{ENVS}advantage: {{name: entropic}}")
    assert short.config == long.config
    assert short.config.advantage == Entropic(beta=2, clip=16)
    assert short.origins == long.origins
    assert short.origins["advantage.name"] == "a.yaml:2"
    assert short.origins["advantage.beta"] == "default"
    assert load(f"{ENVS}advantage:").config.advantage == GroupMean()
    envs = {"arithmetic": {"advantage": "pkpo"}, "pairs": {}}
    python = Config.model_validate({"envs": envs, "advantage": "mine:own"})
    assert python.advantage == CustomAdvantage(function="mine:own")
    assert python.envs["arithmetic"].advantage == PKPO(k=4)


def test_a_later_estimator_replaces_an_earlier_name_but_not_its_settings(load: Load, refused: Refused) -> None:
    assert load(f"{ENVS}advantage: {{name: pkpo, k: 3}}", "advantage=rloo").config.advantage.name == "rloo"
    assert load(f"{ENVS}advantage: {{name: pkpo, k: 3}}", "advantage.k=2").config.advantage == PKPO(k=2)
    assert "advantage.k: is not a field of rloo" in refused(
        f"{ENVS}advantage: {{name: pkpo, k: 3}}", "advantage.name=rloo"
    )


def test_environment_uses_its_own_estimator_or_that_of_the_run(load: Load, refused: Refused) -> None:
    envs = "envs:\n  a: {env: arithmetic, advantage: {name: pkpo, k: 2}}\n  b: {env: arithmetic, advantage: null}\n"
    config = load(f"{envs}advantage: grpo").config
    assert config.envs["a"].advantage == PKPO(k=2)
    assert (config.envs["b"].advantage, config.advantage.name) == (None, "grpo")
    assert "envs.a.advantage.name: expected group_mean" in refused("envs: {a: {env: arithmetic, advantage: grop}}")
    envs_text = "envs: {arithmetic: {advantage: rloo}}\n"
    assert refused(f"{envs_text}advantage: grpo") == (
        "a.yaml:2: advantage: has no effect, because every environment sets its own advantage"
    )
    load(envs_text)


def test_group_of_one_needs_a_custom_estimator(load: Load, refused: Refused, folder: Path) -> None:
    (folder / "mine.py").touch()
    alone = "envs: {arithmetic: {group_size: 1, advantage: %s}}"
    assert "a group of 1 has no baseline, so rank would train nothing" in refused(alone % "rank")
    load(alone % "mine.py:own")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 3", "a.yaml: envs: name the environments to train on, for instance envs: {arithmetic: {}}"),
        ("envs:", "a.yaml: envs: name the environments to train on"),
        ("envs: {}", "a.yaml:1: envs: name the environments to train on"),
        ("envs: [arithmetic]", "a.yaml:1: envs: expected a mapping, found a list"),
        ("envs: {'bad name': {}}", 'a.yaml:1: envs."bad name": the name may contain only letters'),
    ],
)
def test_a_run_needs_an_environment(refused: Refused, text: str, message: str) -> None:
    assert message in refused(text)


def test_each_mistake_is_one_line(refused: Refused) -> None:
    lines = refused(f"{ENVS}steps: 0\nbatch: {{group: 1}}\nseed: x").splitlines()
    assert sorted(line.split(": ")[1] for line in lines) == ["batch.group", "seed", "steps"]


def test_every_value_has_an_origin_and_the_record_loads_as_the_same_configuration(load: Load, folder: Path) -> None:
    resolved = load(
        f"{ENVS}name: ${{RUN}}\nsampling: {{stop: ['a b', '$${{x}}', on, '']}}",
        "loss={name: ppo}",
        environ={"RUN": "r"},
    )
    assert set(resolved.origins) == {".".join(map(str, path)) for path, _ in leaves(from_python(resolved.tree))}
    (folder / "again.yaml").write_text(yaml.safe_dump(resolved.tree))
    again = load_config([Path("again.yaml")], environ={"RUN": "r"})
    assert again.config == resolved.config
    assert again.tree == resolved.tree


def test_the_record_of_a_run_is_a_configuration(load: Load, folder: Path) -> None:
    resolved = load(f"{ENVS}steps: 3")
    (folder / "config.yaml").write_text("\n".join(show_lines(resolved)))
    again = load_config([Path("config.yaml")], environ={})
    assert again.config == resolved.config
    assert again.origins["steps"].startswith("config.yaml:")


def test_shown_configuration_has_the_origin_of_every_value(load: Load) -> None:
    args = "envs.arithmetic.args={l: [], m: {}, n: [1, [2.5e-7, null]], 'a b': 'x: y', y: no, t: \"1\", e: ''}"
    resolved = load(f"{ENVS}optimizer: {{eps: 1e-7}}\nsampling: {{stop: [yes, '#x', \"\\n\", é]}}", args)
    text = "\n".join(show_lines(resolved))
    node = parse(text, source="shown")
    assert node is not None
    assert plain(node) == resolved.tree
    assert yaml.safe_load(text) == resolved.tree
    assert "  eps: 1.0e-07" in text
    assert next(line for line in show_lines(resolved) if "  eps:" in line).endswith("  # a.yaml:2")


def test_configuration_made_in_python_records_explicit_values() -> None:
    config = Config(envs={"a": EnvConfig(env="arithmetic", args={"x": "${HOME}"})}, loss=PPO(clip_low=0.5))
    resolved = ResolvedConfig.from_python(config)
    assert resolved.config is config
    assert {key for key, origin in resolved.origins.items() if origin == "python"} == {
        "envs.a.env",
        "envs.a.args.x",
        "loss.name",
        "loss.clip_low",
    }
    args = load_config([], [f"envs.a.args={resolved.tree['envs']['a']['args']}"], environ={}).config.envs["a"].args  # type: ignore[index,call-overload]
    assert args == {"x": "${HOME}"}


def test_reference_in_a_python_setting_is_recorded_as_a_literal(tmp_path: Path) -> None:
    settings = {"envs": {"arithmetic": {}}, "sampling": {"stop": ["${HOME}"]}}
    (tmp_path / "config.yaml").write_text("\n".join(show_lines(load_config([], settings=settings))))
    assert load_config([tmp_path / "config.yaml"], environ={}).config.sampling.stop == ["${HOME}"]


def test_user_file_is_found_beside_the_configuration_that_names_it(folder: Path) -> None:
    examples = folder / "examples"
    examples.mkdir()
    (examples / "my_env.py").touch()
    (folder / "other.py").touch()
    (examples / "model").mkdir()
    text = """
envs: {a: {env: my_env.py:Reverse, args: {grader: my_env.py:grade, text: gone.py:x}}, b: {env: other.py:X.y}}
model: model
advantage: ./my_env.py:advantage
sampling: {stop: ["gone.py:x"]}
loss: {name: custom, function: my_env.py:loss}
"""
    (examples / "a.yaml").write_text(text)
    config = load_config([Path("examples/a.yaml")], environ={}).config
    assert config.envs["a"].env == f"{examples / 'my_env.py'}:Reverse"
    assert config.envs["a"].args == {"grader": f"{examples / 'my_env.py'}:grade", "text": "gone.py:x"}
    assert config.envs["b"].env == f"{folder / 'other.py'}:X.y"
    assert config.model == str(examples / "model")
    assert config.loss.model_dump()["function"] == f"{examples / 'my_env.py'}:loss"
    assert config.advantage == CustomAdvantage(function=f"{examples / 'my_env.py'}:advantage")
    with pytest.raises(
        ConfigError, match=r"examples/a\.yaml:2: envs\.a\.env|command line: envs\.a\.env: there is no file"
    ):
        load_config([Path("examples/a.yaml")], ["envs.a.env=my_env.py:Reverse"], environ={})


def test_missing_user_file_suggests_the_nearest_one(refused: Refused, folder: Path) -> None:
    (folder / "my_env.py").touch()
    message = refused("envs: {a: {env: my_evn.py:X}}")
    assert message == f"a.yaml:1: envs.a.env: there is no file 'my_evn.py' in {folder}. Did you mean 'my_env.py'?"


@pytest.mark.parametrize(
    "text",
    [
        "envs: {a: {env: rows, args: {path: '${NAME:-x.csv}'}}}",
        "envs: {math: {args: {path: '${NAME:-x.csv}'}}}",
        "envs: {b: {}}\neval: {envs: {a: {env: rows, args: {path: '${NAME:-x.csv}'}}}}",
    ],
)
def test_relative_table_starts_at_the_folder_of_the_configuration(folder: Path, text: str) -> None:
    (folder / "own").mkdir()
    (folder / "own" / "a.yaml").write_text(text)

    def load(**environ: str) -> object:
        config = load_config([Path("own/a.yaml")], environ=environ).config
        return next(spec.args["path"] for spec in (*config.envs.values(), *config.eval.envs.values()) if spec.args)

    assert load() == str(folder / "own" / "x.csv")  # that is not there
    (folder / "x.csv").touch()
    assert load() == str(folder / "x.csv")
    (folder / "own" / "x.csv").touch()
    assert load() == str(folder / "own" / "x.csv")
    assert load(NAME="/absent/x.csv") == "/absent/x.csv"


def test_lists_of_a_file_are_tuples_of_the_configuration_and_come_back_from_a_run(folder: Path) -> None:
    Path("words.jsonl").touch()
    text = "envs: {arithmetic: {}}\nwarm_start: {files: words.jsonl, steps: 2, roles: [assistant, user]}\n"
    Path("a.yaml").write_text(text)
    resolved = load_config([Path("a.yaml")], environ={})
    assert resolved.config.warm_start is not None
    assert resolved.config.warm_start.roles == ("assistant", "user")
    Path("recorded.yaml").write_text("\n".join(show_lines(resolved)))
    assert load_config([Path("recorded.yaml")], environ={}).config == resolved.config


def test_importing_the_package_loads_neither_pydantic_nor_yaml() -> None:
    code = "import sys, rlkit, rlkit.config; print({'pydantic', 'yaml', 'numpy', 'torch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_loading_a_configuration_loads_nothing_heavy() -> None:
    code = (
        "import sys; from rlkit.config.loading.load import load_config; load_config([], ['envs.arithmetic={}']);"
        "print({'torch', 'tinker', 'transformers', 'pyarrow', 'pandas', 'asyncio'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
