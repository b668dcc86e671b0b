from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rlkit.config import load_config

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
    assert "thinking: not taken over" in result.stderr
    assert "secrets.openai_api_key: its value is not taken over: set it as OPENAI_API_KEY" in result.stderr
    (tmp_path / "new.yaml").write_text(result.stdout)
    config = load_config([tmp_path / "new.yaml"]).config
    assert (config.name, config.model, config.seed) == ("my-first-run", "Qwen/Qwen3-30B-A3B", 7)
    assert (config.lora.rank, config.batch.groups, config.checkpoint.every) == (16, 8, 5)
    assert (config.sampling.max_tokens, config.sampling.top_p) == (2048, 0.95)
    assert (config.rollouts.timeout_s, config.rollouts.max_live, config.rollouts.min_valid) == (600, 64, 8)
    assert config.loss.model_dump() == {"name": "ppo", "clip_low": 0.8, "clip_high": 1.3}
    assert config.advantage.name == "grpo"
    first, second = config.envs["generalreasoning-whodunit"], config.envs["other-whodunit"]
    assert (first.group_size, first.temperature, second.group_size) == (16, 0.9, 8)
    assert first.args["secrets"] == {"openai_api_key": "OPENAI_API_KEY"}
    assert "secrets" not in second.args
    assert first.args["target"] == "GeneralReasoning/WhoDunIt"
    assert first.args["splits"] == {"train": {"shuffle": True, "num_samples": 100}}
    assert (first.args["nonterminal_reward"], first.args["max_total_tokens"]) == (-1.0, 16384)


def test_json_has_the_notes(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("environments: {A/B: {num_rollouts: 4}}\nnum_epochs: 2\n")
    record = json.loads(rlkit("import", "openreward-config", "old.yaml", "--json").stdout)
    assert list(record["config"]["envs"]) == ["b"]
    assert record["notes"] == ["num_epochs: not taken over: say how long to train with `steps`"]


def test_what_the_cookbook_does_not_know_is_one_line(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    for text, message in [
        ("modle_name: x\n", "error: old.yaml: modle_name: the cookbook has no such field. Did you mean 'model_name'?"),
        ("model_name: x\n", "error: old.yaml: environments: there is none"),
        ("environments: {A/B: {rollouts: 1}}\n", "error: old.yaml: environments.A/B.rollouts: the cookbook has no"),
    ]:
        (tmp_path / "old.yaml").write_text(text)
        result = rlkit("import", "openreward-config", "old.yaml")
        assert result.exit_code == 2
        assert result.stderr.startswith(message), result.stderr


def test_what_comes_out_can_be_read_again(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    printed = yaml.safe_load(rlkit("import", "openreward-config", "old.yaml").stdout)
    assert printed == json.loads(rlkit("import", "openreward-config", "old.yaml", "--json").stdout)["config"]
