from __future__ import annotations

import json

import pytest

from rlkit.config.loading.resolved import ResolvedConfig, show_lines
from rlkit.config.loading.secrets import is_secret, redact, secret_warnings
from rlkit.config.schema import Config, EnvConfig
from rlkit.types import Json
from tests.config.conftest import Load, Refused

SHAPES = [
    "tml-AbCdEfGh12345678",
    "sk-proj-abcdefghijklmnop1234",
    "sk-ant-api03-abcdefghijklmnop",
    "hf_abcdefghijklmnopqrst",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_abcdefghijklmnopqrst123456",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
    "https://user:hunter2@example.org/v1",
    "prefix tml-AbCdEfGh12345678 suffix",
    "${NAME:-hf_abcdefghijklmnopqrst}",
]


@pytest.mark.parametrize("secret", SHAPES)
@pytest.mark.parametrize(
    "where", ["service: {{base_url: {}}}", "envs: {{arithmetic: {{args: {{list: [{}]}}}}}}", "unknwon: {}", "{}: 1"]
)
def test_a_written_secret_is_refused_by_field_and_never_shown(refused: Refused, secret: str, where: str) -> None:
    message = refused("steps: -1\n" + where.format(json.dumps(secret)))
    assert message.startswith("a.yaml:2: ")
    assert "secret" in message
    assert "\n" not in message
    for part in (secret, redact(secret)[:-1], "hunter2"):
        assert part not in message


@pytest.mark.parametrize(
    ("key", "text", "secret"),
    [
        ("wandb_key", "0123456789abcdef0123456789abcdef01234567", True),
        ("apiKey", "abcd1234abcd1234", True),
        ("token", "abcd1234abcd1234", True),
        ("db_password", "correct-horse-battery", True),
        ("password", "hunter2hunter2", True),
        ("CLIENT_SECRET", "correct-horse-battery", True),
        ("api_key", "${API_KEY}", False),
        ("api_key", "${API_KEY:-}", False),
        ("api_key", "short", False),
        ("max_tokens", "abcd1234abcd1234", False),
        ("tokenizer", "HuggingFaceTB/SmolLM2-135M-Instruct", False),
        ("eos_token", "<|end_of_turn_12|>", False),
        ("answer_key", "the_final_answer_column", False),
        ("secret_word", "elephant", False),
        ("password", "please say the magic word", False),
        ("monkey", "abcd1234abcd1234", False),
        ("model", "Qwen/Qwen3-30B-A3B-Instruct-2507", False),
        ("load_checkpoint", "tinker://0f8fad5b-d9cb-469f-a165-70867728950e/weights/000100", False),
        ("url", "https://user@example.org:8000/a@b", False),
        ("text", "task-oriented risk-averse desk-sk-1", False),
    ],
)
def test_what_is_a_secret_depends_on_the_key_and_the_text(key: str, text: str, secret: bool) -> None:
    assert is_secret(key, text) is secret


@pytest.mark.parametrize(
    "args",
    [
        {"db_pass": "elephant"},
        {"password": "elephant"},
        {"dbPasswd": "elephant"},
        {"auth": "elephant"},
        {"dsn": "postgres://elephant/db"},
        {"git_creds": "elephant"},
        {"api_key": "elephant"},
        {"wandb_token": "elephant"},
        {"client_secret_2": "elephant"},
        {"login": {"users": [{"password": "elephant"}]}},
        {"passwords": ["elephant"]},
        {"password": "${DB:-elephant}"},
        {"note": "xoxb-123456789012-elephant"},
        {"note": "github_pat_elephantelephantelephant"},
    ],
)
def test_a_secret_by_its_name_that_is_written_out_is_a_warning_without_it(args: dict[str, Json]) -> None:
    (warning,) = secret_warnings(args, field="envs.a.args")
    assert warning.startswith("envs.a.args.")
    assert "write ${NAME} instead" in warning
    assert "elephant" not in warning


@pytest.mark.parametrize(
    "args",
    [
        {"password": "${DB}"},
        {"password": "${DB:-}"},
        {"answer_key": "the_final_answer_column", "key_field": "question", "eos_token": "<|im_end|>"},
        {"secret_word": "elephant", "password": "say the magic word", "auth": "none", "auth_method": "certificate"},
        {"max_tokens": 4096, "stop_tokens": ["<|im_end|>"], "passes": "elephant", "author": "elephant"},
        {"private": True, "tokenizer": "HuggingFaceTB/SmolLM2-135M-Instruct", "url": "https://example.org/a"},
    ],
)
def test_references_and_settings_are_no_warning(args: dict[str, Json]) -> None:
    assert secret_warnings(args, field="envs.a.args") == []


def test_a_secret_on_the_command_line_is_not_repeated(refused: Refused) -> None:
    for override in ("x.y=sk-abcdefghijklmnop1234", "sk-abcdefghijklmnop1234", "x.api_key=abcd1234abcd1234"):
        message = refused("envs: {arithmetic: {}}", override)
        assert "abcd" not in message
        assert message.startswith("command line: ")


def test_a_secret_is_refused_even_where_a_later_value_replaces_it(refused: Refused) -> None:
    message = refused("envs: {arithmetic: {args: {api_key: abcd1234abcd1234}}}", "envs.arithmetic.args.api_key=x")
    assert message.startswith("a.yaml:1: envs.arithmetic.args.api_key contains a secret: write ${NAME}")


def test_a_secret_given_in_python_is_used_but_not_recorded() -> None:
    config = Config(envs={"arithmetic": EnvConfig(args={"api_key": "abcd1234abcd1234", "n": 1})})
    resolved = ResolvedConfig.from_python(config)
    assert resolved.config.envs["arithmetic"].args["api_key"] == "abcd1234abcd1234"
    assert resolved.tree["envs"]["arithmetic"]["args"] == {"api_key": "[redacted]", "n": 1}  # type: ignore[index,call-overload]


def test_ordinary_settings_are_no_secrets(load: Load) -> None:
    load("envs: {arithmetic: {args: {max_tokens: 1234567890123456, key_field: question}}}\nsampling: {max_tokens: 64}")


def test_what_stands_for_a_secret_is_refused_where_it_would_be_used(load: Load, refused: Refused) -> None:
    config = Config(envs={"arithmetic": EnvConfig(args={"list": [{"api_key": "abcd1234abcd1234"}]})})
    recorded = "\n".join(show_lines(ResolvedConfig.from_python(config)))
    message = refused(recorded)
    assert "envs.arithmetic.args.list.0.api_key was a secret and is not recorded: set it to ${NAME}" in message
    again = 'envs.arithmetic.args.list=[{api_key: "${API_KEY}"}]'
    resolved = load(recorded, again, environ={"API_KEY": "abcd1234abcd1234"})
    assert resolved.config == config
