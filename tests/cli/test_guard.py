from __future__ import annotations

import errno
import io
import json
import sys
from pathlib import Path

import pytest
import typer

from rlkit.cli.common.guard import command
from rlkit.errors import ConfigError, MissingError, RlkitError, RunFailed, ServiceError, UsageError


class BudgetReached(RlkitError):
    exit_code = 4


def exit_code_of(error: BaseException, *, json: bool = False, debug: bool = False) -> int:
    with pytest.raises(typer.Exit) as exited, command(json=json, debug=debug):
        raise error
    return exited.value.exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("steps: too few"), 2),
        (ConfigError("steps: too few"), 2),
        (MissingError("steps: too few"), 3),
        (RunFailed("steps: too few"), 1),
        (ServiceError("steps: too few"), 1),
        (BudgetReached("steps: too few"), 4),
        (OSError(errno.ENAMETOOLONG, "steps: too few"), 2),
        (OSError(errno.ENOSPC, "steps: too few"), 1),
    ],
)
def test_an_error_is_one_line_and_the_exit_code_of_its_class(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(error) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: steps: too few\n")


def test_with_json_the_error_is_also_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code_of(ConfigError("steps: too few"), json=True)
    assert json.loads(capsys.readouterr().out) == {"error": "steps: too few", "type": "ConfigError", "exit_code": 2}


def test_unexpected_exception_is_reported_as_a_bug_with_a_traceback_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "tml-canary-1234")
    assert exit_code_of(ValueError("odd\ntml-canary-1234")) == 1
    (bug_file,) = (tmp_path / "runs").glob("bug-*.txt")
    stderr = capsys.readouterr().err
    assert stderr == f"error: this is a bug in rlkit: ValueError: odd ***; the traceback is in {bug_file}\n"
    assert "Traceback (most recent call last)" in bug_file.read_text()
    assert "canary" not in bug_file.read_text()


def test_a_bug_with_a_name_that_is_no_utf_8_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(ValueError("odd \udc80")) == 1
    assert "this is a bug in rlkit: ValueError: odd" in capsys.readouterr().err
    (bug_file,) = (tmp_path / "runs").glob("bug-*.txt")
    assert "ValueError: odd \\udc80" in bug_file.read_text()


def test_debug_shows_the_traceback_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(ValueError("odd"), debug=True) == 1
    stderr = capsys.readouterr().err
    assert "Traceback" in stderr
    assert stderr.endswith("error: this is a bug in rlkit: ValueError: odd\n")
    assert not (tmp_path / "runs").exists()


def test_traceback_that_cannot_be_saved_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "file"))
    assert exit_code_of(ValueError("odd")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_group_of_one_exception_is_that_exception(capsys: pytest.CaptureFixture[str]) -> None:
    group = ExceptionGroup("unhandled errors in a TaskGroup", [ExceptionGroup("", [MissingError("no model")])])
    assert exit_code_of(group) == 3
    assert capsys.readouterr().err == "error: no model\n"


def test_a_full_disk_is_not_a_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(OSError(errno.ENOSPC, "No space left on device", "/runs/x")) == 1
    assert "bug" not in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_folder_in_place_of_a_file_is_not_a_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IsADirectoryError) as raised:
        tmp_path.read_text()
    assert exit_code_of(raised.value) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}: Is a directory\n"


def test_ctrl_c_is_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(KeyboardInterrupt(), json=True) == 130
    captured = capsys.readouterr()
    assert captured.err == "interrupted\n"
    assert json.loads(captured.out)["exit_code"] == 130


def test_with_json_stdout_belongs_to_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    with command(json=True, debug=False) as output:
        print("an environment that prints")
        output.data({"a": 1})
    captured = capsys.readouterr()
    assert captured.out == '{"a": 1}\n'
    assert captured.err == "an environment that prints\n"


def test_dotenv_extends_the_environment_and_its_secrets_are_redacted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOTENV_CANARY_KEY", "")
    monkeypatch.delenv("DOTENV_CANARY_KEY")
    (tmp_path / ".env").write_text("DOTENV_CANARY_KEY=tml-canary-1234\n")
    assert exit_code_of(UsageError("tml-canary-1234")) == 2
    assert capsys.readouterr().err == "error: ***\n"


def test_a_message_in_another_script_does_not_break_an_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stderr", ascii_stream)
    assert exit_code_of(UsageError("größer")) == 2
