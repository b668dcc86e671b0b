"""Options of the predecessors that are seen only where they arrive: in calls of the Tinker SDK, prompts and trials.

The SDK, the engine and the sandbox are the real ones; calls are watched on their way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from rlkit.chat.renderers import load_chat
from rlkit.config.loading.load import load_config
from rlkit.engine import EngineServer
from rlkit.tinker_client.connect import choose_service

from .cli.conftest import rlkit

__all__ = ["rlkit"]

VOWELS = """
import rlkit

class Vowels(rlkit.SingleTurnEnv):
    def prompt(self): return "?"
    def grade(self, reply): return float(sum(token % 7 for token in reply.turn.completion.tolist()))
"""

CONFIG = """
envs: {vowels: {env: vowels.py:Vowels}}
steps: 1
seed: 7
lora: {rank: 4}
batch: {groups: 2, group_size: 4}
sampling: {max_tokens: 6, temperature: 0.7, top_p: 0.9, top_k: 40}
optimizer: {learning_rate: 3.0e-4, beta1: 0.8, beta2: 0.9, eps: 1.0e-6, weight_decay: 0.01}
loss: {name: ppo, clip_low: 0.7, clip_high: 1.4}
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vowels.py").write_text(VOWELS)
    for name in ("TINKER_API_KEY", "OPENREWARD_API_KEY"):  # what a command takes from .env is gone with the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EngineServer]:
    with EngineServer(threads=1, root=tmp_path / "engine") as engine:
        yield engine


def test_configured_options_reach_the_configured_service(
    rlkit: Callable[..., Any],
    server: EngineServer,
    byte_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]()

    def watch(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def watched(self: object, *arguments: Any, **keywords: Any) -> object:
            calls.setdefault(name, []).append((arguments, keywords))
            return plain(self, *arguments, **keywords)

        monkeypatch.setattr(owner, name, watched)

    watch(tinker.ServiceClient, "create_lora_training_client")
    watch(tinker.SamplingClient, "sample")
    watch(tinker.TrainingClient, "forward_backward")
    watch(tinker.TrainingClient, "optim_step")
    monkeypatch.setenv("TINKER_API_KEY", server.api_key)
    (tmp_path / "a.yaml").write_text(f"{CONFIG}model: {byte_model_dir}\n")
    result = rlkit("train", "a.yaml", f"service.base_url={server.url}", "--json")
    assert result.exit_code == 0, result.stderr

    ((positional, settings),) = calls["create_lora_training_client"]
    everything = {**settings, **dict(enumerate(positional))}.values()
    assert {str(byte_model_dir), 4} <= set(everything)
    sample_arguments = [value for arguments, keywords in calls["sample"] for value in (*arguments, *keywords.values())]
    sampling_params = [value for value in sample_arguments if isinstance(value, tinker.SamplingParams)]
    assert sampling_params
    for params in sampling_params:
        assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (6, 0.7, 0.9, 40)
    assert sum(value for value in sample_arguments if type(value) is int) == 8, "two groups of four"
    (((data, loss, bounds), _),) = calls["forward_backward"]
    assert len(data) == 8
    assert (loss, bounds) == ("ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4})
    (((adam,), _),) = calls["optim_step"]
    assert (adam.learning_rate, adam.beta1, adam.beta2, adam.eps, adam.weight_decay) == (3e-4, 0.8, 0.9, 1e-6, 0.01)


def test_keys_of_a_dotenv_file_select_the_service(
    rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / ".env").write_text("TINKER_API_KEY=tml-made-up\nTOKENIZERS_PARALLELISM=false\n")
    (tmp_path / "a.yaml").write_text("envs: {vowels: {env: vowels.py:Vowels}}\nmodel: Qwen/Qwen3-8B\n")
    parts = json.loads(rlkit("train", "a.yaml", "--dry-run", "--json").stdout)["parts"]
    (service,) = [part["detail"] for part in parts if part["name"] == "service"]
    assert service.startswith("the hosted Tinker service (TINKER_API_KEY is set)")


@pytest.mark.parametrize(("renderer", "closed"), [(None, False), ("qwen3_disable_thinking", True)])
def test_renderer_can_disable_thinking(renderer: str | None, closed: bool) -> None:
    chat = {} if renderer is None else {"chat": {"renderer": renderer}}
    settings: dict[str, object] = {"envs": {"words": {}}, "model": "Qwen/Qwen3-30B-A3B", **chat}
    config = load_config([], settings=settings | {"service": {"base_url": "http://127.0.0.1:9"}}).config
    format = load_chat(config, engine=choose_service(config.service).kind == "engine", note=lambda message: None)
    prompt_text = format.decode(format.render([{"role": "user", "content": "2+2?"}]).tokens)
    assert prompt_text.rstrip().endswith("</think>") is closed
