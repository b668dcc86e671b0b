from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlkit.config.loading.load import load_config
from rlkit.rollout.settings import make_env_settings

OLD = """
wandb_project_name: mine
wandb_run_name: first
openreward_run_name: my first run
model_name: Qwen/Qwen3-30B-A3B
lora_rank: 16
max_response_tokens: 2048
max_total_tokens: 16384
loss_fn: ppo
loss_fn_config: {clip_low_threshold: 0.8, clip_high_threshold: 1.3}
advantage_calculation: centered_normalized
batch_size: 8
learning_rate: 4.0e-5
save_every: 5
max_rollout_concurrency: 64
rollout_timeout: 600
thinking: true
seed: 7
secrets: {openai_api_key: sk-0123456789abcdef0123}
environments:
  GeneralReasoning/WhoDunIt:
    splits: {train: {shuffle: true, num_samples: 100}}
    num_rollouts: 16
    max_failing_rollouts: 4
    temperature: 0.9
    top_p: 0.95
    nonterminal_reward: -1.0
    reward_reduction: sum
  Other/WhoDunIt:
    splits: {train: {shuffle: false}}
    num_rollouts: 8
    top_p: 0.95
    secrets: {openai_api_key: ""}
"""


def test_a_configuration_of_the_cookbook_becomes_one_of_rlkit(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "tinker-config.yaml").write_text(OLD)
    result = rlkit("import", "openreward-config", "tinker-config.yaml")
    assert result.exit_code == 0, result.output
    assert "sk-0123" not in result.output
    assert "secrets.openai_api_key: its value is not taken over: set it as OPENAI_API_KEY" in result.stderr
    (tmp_path / "new.yaml").write_text(result.stdout)
    config = load_config([tmp_path / "new.yaml"]).config
    assert (config.name, config.model, config.seed) == ("my-first-run", "Qwen/Qwen3-30B-A3B", 7)
    assert (config.lora.rank, config.batch.groups, config.checkpoint.every) == (16, 8, 5)
    assert (config.sampling.max_tokens, config.sampling.top_p) == (2048, 0.95)
    assert (config.rollouts.timeout_s, config.rollouts.max_concurrent, config.rollouts.min_valid) == (600, 64, 2)
    assert config.loss.model_dump() == {"name": "ppo", "clip_low": 0.8, "clip_high": 1.3}
    assert config.advantage.name == "grpo"
    assert config.track.wandb is not None
    assert (config.track.wandb.project, config.track.wandb.name) == ("mine", "first")
    first, second = config.envs["generalreasoning-whodunit"], config.envs["other-whodunit"]
    assert (first.group_size, first.temperature, second.group_size) == (16, 0.9, 8)
    assert (first.max_failing_rollouts, second.max_failing_rollouts) == (4, 0)
    assert (first.max_retries, second.max_retries) == (48, 24), "three times for each rollout"
    settings = make_env_settings(config, context=None)
    assert {name: env_settings.min_valid for name, env_settings in settings.items()} == {
        "generalreasoning-whodunit": 12,
        "other-whodunit": 8,
    }
    assert first.args["secrets"] == {"openai_api_key": "OPENAI_API_KEY"}
    assert "secrets" not in second.args
    assert first.args["target"] == "GeneralReasoning/WhoDunIt"
    assert first.args["splits"] == {"train": {"shuffle": True, "num_samples": 100}}
    assert (first.args["nonterminal_reward"], first.args["max_total_tokens"]) == (-1.0, 16384)


def test_json_has_the_notes(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("model_name: a/b\nenvironments: {A/B: {num_rollouts: 4}}\nnum_epochs: 2\n")
    record = json.loads(rlkit("import", "openreward-config", "old.yaml", "--json").stdout)
    assert list(record["config"]["envs"]) == ["b"]
    assert record["notes"] == []
    assert (record["config"]["epochs"], "steps" in record["config"]) == (2, False)


def test_defaults_of_the_cookbook_are_imported(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("model_name: Qwen/Qwen3-8B\nenvironments: {A/B: {num_rollouts: null}}\n")
    result = rlkit("import", "openreward-config", "old.yaml")
    (tmp_path / "new.yaml").write_text(result.stdout)
    config = load_config([tmp_path / "new.yaml"]).config
    assert (config.sampling.max_tokens, config.optimizer.learning_rate) == (4096, 4e-5)
    assert (config.rollouts.timeout_s, config.seed, config.lora.rank) == (300, 42, 32)
    assert (config.checkpoint.every, config.loss.name, config.advantage.name) == (10, "ppo", "grpo")
    assert config.track.wandb is None
    assert config.chat.renderer == "qwen3_disable_thinking", "the cookbook does not let models think unless told to"
    assert (config.rollouts.max_concurrent, config.envs["b"].max_failing_rollouts, config.steps) == (32, 0, 100)
    assert (
        "num_epochs: the cookbook has no limit, but this run has 100 steps; set the number with `steps`"
        in result.stderr
    )


def test_missing_model_name_is_noted(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("environments: {A/B: {}}\n")
    note = (
        "model_name: the cookbook needs it, and this trains HuggingFaceTB/SmolLM2-135M-Instruct: name one with `model`"
    )
    assert note in rlkit("import", "openreward-config", "old.yaml").stderr.splitlines()


def test_thinking_is_noted_if_it_cannot_be_imported(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    for model, is_noted in (("Qwen/Qwen3-8B", False), ("meta-llama/Llama-3.1-8B-Instruct", True), ("my/own", True)):
        (tmp_path / "old.yaml").write_text(f"model_name: {model}\nthinking: true\nenvironments: {{A/B: {{}}}}\n")
        record = json.loads(rlkit("import", "openreward-config", "old.yaml", "--json").stdout)
        assert "chat" not in record["config"]
        assert any(note.startswith("thinking: not taken over") for note in record["notes"]) == is_noted


def test_environments_of_the_same_name_stay_separate(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("environments: {A/Maths: {}, a/maths: {}, B/maths: {}, B/-x: {}, B/_: {}}\n")
    record = json.loads(rlkit("import", "openreward-config", "old.yaml", "--json").stdout)
    targets = {name: env["args"]["target"] for name, env in record["config"]["envs"].items()}
    assert targets == {"a-maths": "A/Maths", "a-maths-2": "a/maths", "b-maths": "B/maths", "x": "B/-x", "env": "B/_"}
    assert any(note.startswith("environments: drawn equally often") for note in record["notes"])


def test_unknown_setting_is_an_error_of_one_line(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    for text, message in [
        ("modle_name: x\n", "error: old.yaml: modle_name: the cookbook has no such field. Did you mean 'model_name'?"),
        ("model_name: x\n", "error: old.yaml: environments: there is none"),
        ("environments: {A/B: {rollouts: 1}}\n", "error: old.yaml: environments.A/B.rollouts: the cookbook has no"),
        ("environments: {A/B: {num_rollouts: many}}\n", "error: old.yaml: environments.A/B.num_rollouts: 'many' is no"),
        (
            "environments: {A/B: {max_failing_rollouts: [1]}}\n",
            "error: old.yaml: environments.A/B.max_failing_rollouts:",
        ),
        (
            "environments: {A/B: {num_rollouts: 4, max_failing_rollouts: 3}}\n",
            "error: old.yaml: environments.A/B.max_failing_rollouts: leaves 1 of 4 rollouts, but a group needs "
            "at least 2; set it to 2 or less",
        ),
        (
            "environments: {A/B: {num_rollouts: 1, max_failing_rollouts: 3}}\n",
            "error: old.yaml: environments.A/B.max_failing_rollouts: leaves 0 of 1 rollouts, but a group needs",
        ),
        (
            "environments: {A/B: {num_rollouts: 0}}\n",
            "error: old.yaml: environments.A/B.num_rollouts: expected at least",
        ),
        ("environments: {A/B: {num_rollouts: 1}}\n", "error: old.yaml: environments.A/B: a group of 1 has no baseline"),
        (
            "environments: {A/B: {temperature: hot}}\n",
            "error: old.yaml: environments.A/B.temperature: expected a number",
        ),
        (
            "batch_size: many\nenvironments: {A/B: {}}\n",
            "error: old.yaml: batch_size: expected an integer, found 'many'",
        ),
        ("num_epochs: 0\nenvironments: {A/B: {}}\n", "error: old.yaml: num_epochs: expected at least 1, found 0"),
        ("max_rollout_retries: x\nenvironments: {A/B: {}}\n", "error: old.yaml: max_rollout_retries: 'x' is no whole"),
        ("environments: [A/B]\n", "error: old.yaml: environments: must be a mapping"),
        ("environments: {1: {}}\n", "error: old.yaml: target: '1' is not an environment"),
        ("environments: {'http://host': {}}\n", "error: old.yaml: environments.http://host: the cookbook knows"),
        ("1: 2\n", "error: old.yaml: 1: the cookbook has no such field"),
        ("seed: x\nenvironments: {A/B: {}}\n", "error: old.yaml: seed: expected an integer, found 'x'"),
        ("environments: {A/B: {top_p: high}}\n", "error: old.yaml: sampling.top_p: expected a number, found 'high'"),
    ]:
        (tmp_path / "old.yaml").write_text(text)
        result = rlkit("import", "openreward-config", "old.yaml")
        assert result.exit_code == 2
        assert result.stderr.startswith(message), result.stderr
        assert len(result.stderr.splitlines()) < 4


def test_imported_configuration_loads(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    printed = yaml.safe_load(rlkit("import", "openreward-config", "old.yaml").stdout)
    assert printed == json.loads(rlkit("import", "openreward-config", "old.yaml", "--json").stdout)["config"]
