from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.cli.common.output import Output, has_colours, is_redrawable, redact, sanitise, to_json

SECRET = 'tml-"canary"\\0123'


@pytest.mark.parametrize("name", ["TINKER_API_KEY", "hf_token", "MY_SECRET_THING", "DB_PASSWORD"])
def test_the_value_of_a_secret_is_never_printed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    out, err = io.StringIO(), io.StringIO()
    output = Output(out, err)
    output.line(f"a {SECRET} b")
    output.note(SECRET)
    output.error(SECRET)
    output.data({"key": [SECRET, {SECRET: f"x{SECRET}"}]})
    assert "canary" not in out.getvalue() + err.getvalue()
    assert out.getvalue().startswith("a *** b\n")
    assert json.loads(out.getvalue().splitlines()[1]) == {"key": ["***", {"***": "x***"}]}


def test_secret_that_contains_another_is_redacted_completely() -> None:
    environ = {"A_KEY": "abcdef", "B_KEY": "abcdef123456"}
    assert redact("abcdef123456 abcdef", environ) == "*** ***"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_results_are_wrapped_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = "completed: reward 0.63\nrun  /a-folder/of-a-run/with-a-name"
    assert Output(Terminal(), io.StringIO()).wrap(text).splitlines() == [
        "completed: reward",
        "0.63",
        "run",
        "/a-folder/of-a-run/with-a-name",
    ]
    assert Output(io.StringIO(), io.StringIO()).wrap(text) == text


@pytest.mark.parametrize("value", ["", "false", "1", "0"])
def test_short_and_common_values_are_not_redacted(value: str) -> None:
    assert redact(f"parallel {value} run", {"TOKENIZERS_PARALLELISM": value}) == f"parallel {value} run"


def test_a_path_that_exists_is_not_a_secret(tmp_path: Path) -> None:
    assert redact(f"in {tmp_path}", {"KEY_FOLDER": str(tmp_path)}) == f"in {tmp_path}"


def test_a_variable_of_another_name_is_not_a_secret() -> None:
    assert redact("production", {"STAGE": "production"}) == "production"


@given(st.text())
def test_output_has_no_control_characters(text: str) -> None:
    sanitised = sanitise(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in sanitised)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_json_has_null_for_non_finite_numbers(value: float) -> None:
    assert to_json({"a": [value, 1.5]}) == '{"a": [null, 1.5]}'


def test_json_is_one_line() -> None:
    assert "\n" not in to_json({"text": "two\nlines\u2028"}).replace("\\n", "")


def test_closed_pipe_is_not_an_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        output = Output(stream, stream)
        output.line("nobody reads this")
        output.line("nor this")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_colours_are_used_on_capable_terminals(environ: dict[str, str], expected: bool) -> None:
    assert has_colours(Terminal(), environ) is expected
    assert has_colours(io.StringIO(), environ) is False
    assert is_redrawable(Terminal(), environ) is (environ.get("TERM") != "dumb")


def test_errors_are_red_only_on_such_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    Output(terminal, terminal).error("x")
    assert terminal.getvalue() == "\x1b[31merror:\x1b[0m x\n"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    Output(plain, plain).error("x")
    assert plain.getvalue() == "error: x\n"


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_on_a_full_disk_is_reported_once() -> None:
    errors = io.StringIO()
    output = Output(out=FullDisk(), err=errors, json=True)
    with pytest.raises(OSError, match="No space left"):
        output.data({})
    output.failure("No space left on device", kind="OSError", exit_code=1)
    assert errors.getvalue() == "error: No space left on device\n"
