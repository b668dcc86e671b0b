"""Commands out of replies, and what a model is shown of them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.envs.harbor.agents.commands import make_command_script, make_observation, read_command, split_output

MARK = "0123456789abcdef"


@pytest.mark.parametrize(
    ("reply", "command"),
    [
        ("ls -l", "ls -l"),
        ("  ls -l \nThis shows the files.", "ls -l"),
        ("$ ls", "ls"),
        ("`ls`", "ls"),
        ("echo `ls`", "echo `ls`"),
        ("```bash\ncat > a <<'X'\n1\n\n2\nX\n```\nand more", "cat > a <<'X'\n1\n\n2\nX"),
        ("Here it is:\n```\nls\n```\n```\nrm x\n```", "ls"),
        ("```sh\n$ ls", "ls"),
        ("```bash", None),
        ("```bash\n```", None),
        ("", ""),
        (" \n ", ""),
        ("exit", "exit"),
        ("a\0b\ud800", "ab?"),
    ],
)
def test_a_reply_is_its_first_block_or_its_first_line(reply: str, command: str | None) -> None:
    assert read_command(reply) == command


@given(st.text())
def test_any_reply_gives_a_valid_process_argument_or_none(reply: str) -> None:
    command = read_command(reply)
    assert command is None or b"\0" not in command.encode()


class Result(NamedTuple):
    output: str
    folder: str | None
    exit_status: int


def run(command: str, folder: Path | str) -> Result:
    script = make_command_script(command, folder=str(folder), mark=MARK)
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    assert done.stderr == b""
    return Result(*split_output(done.stdout.decode(errors="replace"), mark=MARK), done.returncode)


@pytest.mark.parametrize(
    ("command", "output", "status"),
    [
        ("echo hello", "hello", 0),
        ("echo no >&2; exit 3", "no", 3),
        ("printf ''", "", 0),
        ("exec > out; echo hello", "", 0),
        ("false", "", 1),
        ("kill -9 $$", "", -9),
        ("cat <<'X'\na 'b'\nX", "a 'b'", 0),
    ],
)
def test_a_command_has_one_stream_of_output_and_its_exit_status(
    command: str, output: str, status: int, tmp_path: Path
) -> None:
    result = run(command, tmp_path)
    assert (result.output.strip(), result.exit_status) == (output, status)


def test_invalid_shell_syntax_is_answered(tmp_path: Path) -> None:
    result = run("echo 'unfinished", tmp_path)
    assert result.exit_status != 0
    assert "unexpected EOF" in result.output


def test_the_final_folder_of_a_command_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "it's here").mkdir()
    result = run('cd "it\'s here"; echo moved', tmp_path)
    assert (result.folder, result.output.strip()) == (str(tmp_path / "it's here"), "moved")
    assert run("pwd", str(result.folder)).output.strip() == result.folder
    assert run("trap - EXIT; cd /", tmp_path).folder is None
    assert run("true", tmp_path / "gone").folder is not None


@pytest.mark.parametrize(
    ("output", "status", "observation"),
    [
        ("a\nb\n", 0, "a\nb"),
        ("", 0, "(no output)"),
        ("\n", 2, "(exit status 2)"),
        ("no\n", 127, "no\n(exit status 127)"),
        ("\x1b[1mbold\x07\r\n", 0, "\ufffd[1mbold\ufffd"),
        ("0123456789" * 10, 0, "01234\n(… 90 characters left out …)\n56789"),
    ],
)
def test_an_observation_is_printable_text_within_a_limit(output: str, status: int, observation: str) -> None:
    assert make_observation(output, status, max_chars=10 if len(output) > 20 else 100) == observation


@given(st.text(), st.integers(1, 20))
def test_any_output_is_cut_to_the_limit(output: str, max_characters: int) -> None:
    observation = make_observation(output, 1, max_chars=max_characters)
    assert len(observation) <= max_characters + 60
    assert observation.encode()
    assert all(char.isprintable() or char in "\n\t" for char in observation)
