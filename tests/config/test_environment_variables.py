from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.config.loading.environment_variables import escape, export_dotenv, interpolate, read_dotenv
from rlkit.config.loading.load import load_config
from rlkit.config.loading.nodes import Node, Origin, find
from rlkit.config.loading.resolved import ResolvedConfig, show_lines
from rlkit.errors import ConfigError
from tests.config.conftest import Load, Refused

ENVS = "envs: {arithmetic: {}}\n"
CANARY = "canary-7c1f"

FIELDS = [
    "model",
    "name",
    "seed",
    "steps",
    "load_checkpoint",
    "advantage",
    "sampling.max_tokens",
    "sampling.stop.0",
    "sampling.stop",
    "loss.name",
    "loss.clip_low",
    "lora.train_mlp",
    "lora",
    "checkpoint.ttl_days",
    "service.base_url",
    "envs",
    "envs.arithmetic",
    "envs.arithmetic.env",
    "envs.arithmetic.args.api_key",
    "envs.arithmetic.args.deep.token",
    "eval.envs.held_out.env",
    "unknown.field",
]


def show_everything(resolved: ResolvedConfig) -> str:
    return "\n".join([json.dumps([resolved.tree, resolved.origins]), *show_lines(resolved), repr(resolved)])


@given(
    st.sampled_from(FIELDS),
    st.sampled_from(["${K}", "x${K}y", "${K:-other}", "a.py:${K}", "${K}.py:Name", "${K}/a.py:Name", "tinker://${K}"]),
    st.sampled_from([CANARY, f"{CANARY}\n'quoted'", f"sk-{CANARY}-0123456789abcdef"]),
)
def test_value_of_a_variable_is_never_shown(field: str, text: str, value: str) -> None:
    try:
        output = show_everything(load_config([], ["envs.arithmetic={}", f"{field}='{text}'"], environ={"K": value}))
    except ConfigError as error:
        output = str(error)
    assert CANARY not in output


def test_variable_value_reaches_the_run_and_its_name_the_record(load: Load) -> None:
    text = "envs: {arithmetic: {args: {api_key: 'Bearer ${KEY}'}}}"
    resolved = load(text, environ={"KEY": "tml-0123456789"})
    assert resolved.config.envs["arithmetic"].args == {"api_key": "Bearer tml-0123456789"}
    assert resolved.tree["envs"]["arithmetic"]["args"] == {"api_key": "Bearer ${KEY}"}  # type: ignore[index,call-overload]


def test_number_in_a_variable_is_a_number(load: Load, refused: Refused) -> None:
    text = f"{ENVS}steps: ${{N}}\nlora: {{train_mlp: '${{B}}'}}\ncheckpoint: {{ttl_days: '${{E:-}}'}}"
    resolved = load(text, environ={"N": "12", "B": "false"})
    assert (resolved.config.steps, resolved.config.lora.train_mlp, resolved.config.checkpoint.ttl_days) == (
        12,
        False,
        None,
    )
    assert resolved.tree["steps"] == "${N}"
    message = refused(f"{ENVS}steps: ${{N}}", environ={"N": "twelve"})
    assert message == "a.yaml:2: steps: expected an integer, found the value of '${N}'"


@pytest.mark.parametrize(
    ("text", "environ", "value"),
    [
        ("${A}", {"A": "x"}, "x"),
        ("${A}", {"A": ""}, ""),
        ("${A:-d}", {}, "d"),
        ("${A:-d}", {"A": ""}, "d"),
        ("${A:-}", {}, ""),
        ("a${A}b${A}", {"A": "1"}, "a1b1"),
        ("$${A}", {}, "${A}"),
        ("$$", {}, "$$"),
        ("$A and $5", {}, "$A and $5"),
        ("${A}", {"A": "${B}"}, "${B}"),
    ],
)
def test_references_are_replaced_once(text: str, environ: dict[str, str], value: str) -> None:
    assert interpolate(Node(text, Origin("")), environ).value == value


@given(st.text(alphabet="${}aB_:- ", max_size=20))
def test_escaped_text_is_restored(text: str) -> None:
    assert interpolate(Node(escape(text), Origin("")), {}).value == text


def test_an_unset_variable_is_an_error_that_names_the_field(refused: Refused) -> None:
    message = refused(f"{ENVS}sampling:\n  stop: ['${{STOPP}}']", environ={"STOP": "x"})
    assert message.startswith(
        "a.yaml:3: sampling.stop.0: the environment variable STOPP is not set. Did you mean 'STOP'?"
    )
    assert "must begin ${NAME}" in refused(f"{ENVS}name: ${{a b}}")
    assert "cannot contain another reference" in refused(f"{ENVS}name: ${{A:-${{B}}}}")


def test_keys_are_not_replaced() -> None:
    root = interpolate(Node({"${A}": Node("x", Origin(""))}, Origin("")), {})
    assert find(root, ("${A}",)) is not None


def test_environment_overrides_dotenv(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / ".env").write_text("RLKIT_TEST_A=from_file\nRLKIT_TEST_B=from_file\n")
    monkeypatch.setenv("RLKIT_TEST_A", "real")
    (folder / "a.yaml").write_text(f"{ENVS}sampling: {{stop: ['${{RLKIT_TEST_A}}', '${{RLKIT_TEST_B}}']}}")
    assert load_config([Path("a.yaml")]).config.sampling.stop == ["real", "from_file"]
    environ = {"RLKIT_TEST_A": "real"}
    assert export_dotenv(environ=environ) == ("RLKIT_TEST_B",)
    assert environ == {"RLKIT_TEST_A": "real", "RLKIT_TEST_B": "from_file"}


def test_dotenv_supports_quotes_comments_and_export(folder: Path) -> None:
    text = """# a comment
export A=plain value  # a comment
B = "two\\nlines # not a comment"
C='single $x "'   # a comment

D=
E=a#b
F="over
lines"
G=x=y
"""
    (folder / ".env").write_text(text.replace("\n", "\r\n"))
    assert read_dotenv() == {
        "A": "plain value",
        "B": "two\nlines # not a comment",
        "C": 'single $x "',
        "D": "",
        "E": "a#b",
        "F": "over\nlines",
        "G": "x=y",
    }


@pytest.mark.parametrize("line", ["no equals", "A='open", 'A="x" y', "1A=x", f"{CANARY}"])
def test_malformed_line_of_dotenv_is_named_but_not_shown(folder: Path, line: str) -> None:
    (folder / ".env").write_text(f"A=1\n\n{line}\n")
    with pytest.raises(ConfigError, match=r"\.env:3: ") as caught:
        read_dotenv()
    assert CANARY not in str(caught.value)


def test_missing_dotenv_or_a_folder_of_that_name_is_ignored(folder: Path) -> None:
    assert read_dotenv() == {}
    (folder / ".env").mkdir()
    assert read_dotenv() == {}
    (folder / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_dotenv(Path("binary"))
