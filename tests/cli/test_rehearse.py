"""`rlkit train --dry-run`, with the real engine's formats and without its weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.rehearse import longest_timeout_s
from rlkit.config.loading.load import load_config
from rlkit.testing import byte_model
from tests.limits import HANG_S

CONFIG = """
envs: {vowels: {env: vowels.py:Vowels}}
steps: 3
batch: {groups: 2, group_size: 4}
"""

VOWELS = """
import rlkit

class Vowels(rlkit.SingleTurnEnv):
    def prompt(self): return "?"
    def grade(self, reply): return float(sum(token % 7 for token in reply.turn.completion.tolist()))
"""

LOUD = """
import sys, threading, time
import rlkit

print("loaded")

def chatter():
    for _ in range(500):
        sys.stdout.write("on and on\\n")
        time.sleep(0.001)

class Loud(rlkit.SingleTurnEnv):
    def prompt(self): return "?"
    def grade(self, reply):
        if threading.active_count() < 9:
            threading.Thread(target=chatter, daemon=True).start()
        print("graded")
        return float(len(reply.text))
"""

HELD = """
import re
import rlkit

class Held(rlkit.SingleTurnEnv):
    def prompt(self): return "?"
    def grade(self, reply):
        return float(bool(re.match("(a+)+b", "a" * 99)))  # it backtracks for ever, and lets no other thread run
"""

BROKEN = """
import rlkit

class Broken(rlkit.SingleTurnEnv):
    def prompt(self): return "?"
    def grade(self, reply): return None
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    model = byte_model(tmp_path / "model")
    (tmp_path / "vowels.py").write_text(VOWELS)
    (tmp_path / "a.yaml").write_text(f"{CONFIG}model: {model}\n")
    return "a.yaml"


def test_dry_run_prints_its_checks_and_an_estimate(config: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", config, "--dry-run", "--name", "mine")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["ok", "ok", "ok", "not"]
    assert "the whole run takes " in result.stdout
    assert " tokens, $0.00" in result.stdout
    assert "time: unknown; --pilot 1 measures it" in result.stdout
    assert "dry run" in result.stderr
    assert rlkit("train", config, "--dry-run", "--quiet").stderr == ""


@pytest.mark.slow
def test_result_of_a_run_has_the_estimate_of_its_dry_run(config: str, rlkit: Callable[..., Any]) -> None:
    first_run = rlkit("train", config)
    assert re.search(r"^completed: reward \S+ → \S+ in \d+ steps, [\d,]+ tokens, \$", first_run.stdout)
    assert "expected" not in first_run.stdout
    report = json.loads(rlkit("train", config, "--dry-run", "--pilot", "1", "--json").stdout)
    assert report["ok"]
    service = next(part for part in report["parts"] if part["name"] == "service")
    assert service["status"] == "ok"
    assert "4 rollouts and an optimiser step" in service["detail"]
    assert report["estimate"]["seconds"]["low"] > 0
    result = json.loads(rlkit("train", config, "--json").stdout.splitlines()[-1])
    assert result["estimate"] == report["estimate"]
    low, high = (result["estimate"]["tokens"][end] for end in ("low", "high"))
    assert low < result["spending"]["tokens"] < high
    assert "dry run       expected " in rlkit("train", config).stdout


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub, and nothing of one on this machine."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def run_dry(rlkit: Callable[..., Any], config: str, model: str, *overrides: str) -> dict[str, Any]:
    result = rlkit("train", config, f"model={model}", *overrides, "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    return report | {"parts": {part["name"]: (part["status"], part["detail"]) for part in report["parts"]}}


@pytest.mark.usefixtures("nowhere")
def test_tokenizer_and_price_of_a_model_do_not_need_a_key(
    config: str, rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = run_dry(rlkit, config, "openai/gpt-oss-20b")
    monkeypatch.setenv("TINKER_API_KEY", "tml-made-up")
    hosted = run_dry(rlkit, config, "openai/gpt-oss-20b")
    for report in (without, hosted):
        assert report["parts"]["chat"] == ("ok", "a question of one letter is 7 tokens of openai/gpt-oss-20b")
        status, price = report["parts"]["prices"]
        assert (status, price.partition(",")[0]) == ("ok", "of the hosted service on 2026-01-05")
        assert "$0.12 prefill, $0.12 cached, $0.3 sample, $0.36 train" in price
    assert without["estimate"]["tokens"] == hosted["estimate"]["tokens"] == without["hosted_estimate"]["tokens"]
    assert without["estimate"]["usd"] is None, "what the engine has no weights of is not free"
    assert without["hosted_estimate"]["usd"] == hosted["estimate"]["usd"]
    assert hosted["estimate"]["usd"]["low"] > 0
    assert hosted["hosted_estimate"] is None
    status, detail = without["parts"]["model"]
    assert status == "not tried"
    assert "the weights of openai/gpt-oss-20b are not on this machine" in detail
    assert "set TINKER_API_KEY" in detail


@pytest.mark.usefixtures("nowhere")
def test_dry_run_without_a_key_prints_the_price_of_the_hosted_service(config: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", config, "model=openai/gpt-oss-20b", "--dry-run", "--quiet")
    assert "was not found" not in result.output
    assert " tokens\n" in result.stdout, "nothing is said of a price where the engine has no weights"
    assert "  on the hosted Tinker service: $" in result.stdout


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("key", ["", "tml-made-up"])
@pytest.mark.parametrize(("model", "hint"), [("nobody/no-such-model", ""), ("openai/gpt-oss-20c", "gpt-oss-20b")])
def test_unknown_model_has_no_price_and_gets_a_suggestion(
    model: str, hint: str, key: str, config: str, rlkit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    result = rlkit("train", config, f"model={model}", "chat.renderer=role_colon", "--dry-run", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    parts = {part["name"]: (part["status"], part["detail"]) for part in report["parts"]}
    assert report["estimate"]["usd"] is None
    assert report["hosted_estimate"] is None
    status, detail = parts["prices"]
    assert status == "not tried"
    assert model in detail
    assert hint in detail
    assert ("set prices.prefill" in detail) is bool(key)
    if not hint:
        assert parts["chat"][0] == "not tried"
        assert "Four ways: for the model of a run, set chat.tokenizer" in parts["chat"][1]


@pytest.mark.usefixtures("nowhere")
def test_pilot_without_weights_fails_before_any_rollout(config: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", config, "model=openai/gpt-oss-20b", "--dry-run", "--pilot", "1")
    assert result.exit_code == 3
    assert "Without TINKER_API_KEY the embedded engine runs the model" in result.stderr
    assert "playing" not in result.stderr


def test_local_model_is_free_and_its_hosted_price_is_reported(
    config: str, rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    byte_model(tmp_path / "cache" / "models" / "Qwen--Qwen3-8B")
    report = run_dry(rlkit, config, "Qwen/Qwen3-8B", "chat.renderer=chat_template")
    assert "model" not in report["parts"]
    assert report["estimate"]["usd"] == {"low": 0.0, "high": 0.0}
    assert report["hosted_estimate"]["usd"]["low"] > 0


def test_failing_environment_is_exit_code_1(config: str, rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    result = rlkit("train", config, "envs=null", "envs.broken.env=broken.py:Broken", "--dry-run", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert report["estimate"] is None
    failed = [part for part in report["parts"] if part["status"] == "failed"]
    assert [part["name"] for part in failed] == ["envs.broken"]
    assert "Broken returned NoneType" in failed[0]["detail"]


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_output_of_environments_does_not_mix_with_the_result(
    config: str, rlkit: Callable[..., Any], tmp_path: Path, json_too: list[str]
) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    result = rlkit("train", config, "envs=null", "envs.loud.env=loud.py:Loud", "--dry-run", *json_too)
    assert result.exit_code == 0
    assert "graded" in result.stderr
    if json_too:
        assert json.loads(result.stdout)["ok"]
    else:
        first = [line.split()[0] for line in result.stdout.splitlines()]
        assert first == ["ok", "ok", "ok", "not", "the", "time:"]


def run_process(*arguments: str, folder: Path) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command in a process of its own."""
    completed = subprocess.run(
        [sys.executable, "-m", "rlkit", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return completed.returncode, completed.stdout, completed.stderr


@pytest.mark.slow
def test_blocking_grader_ends_the_dry_run_and_is_named(config: str, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    overrides = ("envs=null", "envs.held.env=held.py:Held", "envs.held.timeout_s=0.5")
    code, out, err = run_process("train", config, *overrides, "--dry-run", "--json", folder=tmp_path)
    assert code == 1
    error = json.loads(out)["error"]
    assert error.startswith("playing envs.held: a rollout blocked the event loop for more than 0.5 s (timeout_s), at ")
    assert "held.py:8, in grade: await slow calls" in error
    assert err.splitlines()[-1] == f"error: {error}"


def test_blocked_loop_limit_is_the_longest_rollout_timeout() -> None:
    def longest(**settings: object) -> float:
        return longest_timeout_s(load_config([], settings=settings).config)

    envs = {"a": {"env": "arithmetic", "timeout_s": 5.0}, "b": {"env": "arithmetic", "timeout_s": 9.0}}
    assert longest(envs=envs) == 9
    assert longest(envs=envs, eval={"envs": {"c": {"env": "arithmetic"}}}) == 3600
    assert longest(envs={**envs, "c": {"env": "arithmetic"}}, rollouts={"timeout_s": 70.0}) == 70


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pilot", "1"], "--pilot has no effect without --dry-run: add --dry-run"),
        (["--dry-run", "--pilot", "0"], "'--pilot': Input should be greater than or equal to 1"),
        (["--pilot", "0"], "'--pilot': Input should be greater than or equal to 1"),
        (["--dry-run", "envs.vowels.max_turns=2"], "envs.vowels.max_turns: has no effect"),
        (["--dry-run", "best.metric=optim/entropi"], "Did you mean 'optim/entropy'?"),
        (["--dry-run", "--resume"], "--resume has no effect on a dry run"),
        (["--dry-run", "steps=none"], "steps"),
        (["--dry-run", "budget_usd=1"], "budget_usd has no effect"),
        (["--dry-run", "envs.vowels.env=nonsense"], "nonsense"),
    ],
)
def test_bad_usage_is_one_line(config: str, arguments: list[str], message: str, rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", config, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
