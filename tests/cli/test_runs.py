"""`rlkit runs` and `rlkit chat`, on runs of the embedded engine with a small real model."""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlkit as toolkit
from rlkit.config.loading.run_config import load_run_config
from rlkit.tools.chat import open_chat
from rlkit.types import Sampling

type Command = Callable[..., Any]


class Say(toolkit.SingleTurnEnv):
    def prompt(self) -> str:
        return "Say something."

    def grade(self, reply: toolkit.Reply) -> float:
        return float(len(reply.text) % 2)


@pytest.fixture
def run(byte_model_dir: Path) -> toolkit.RunResult:
    settings: dict[str, Any] = {"batch": {"groups": 1, "group_size": 2}, "sampling": {"max_tokens": 4}}
    return toolkit.train(
        model=str(byte_model_dir), name="first", envs=[Say()], steps=2, lora={"rank": 2}, trackers=[], **settings
    )


def test_runs_are_listed_with_status_steps_reward_and_age(run: toolkit.RunResult, rlkit: Command) -> None:
    line = rlkit("runs").stdout
    assert line.split()[:4] == ["first", "completed", "step", "2/2"]
    assert line.rstrip().endswith(" ago")
    (row,) = json.loads(rlkit("runs", "--json").stdout)
    assert (row["name"], row["step"], row["live"]) == ("first", 2, False)


def test_a_run_with_fewer_steps_than_it_has_finished_is_at_its_last_step(
    run: toolkit.RunResult, rlkit: Command
) -> None:
    assert rlkit("resume", "first", "steps=1", "envs.Say.env=tests.cli.test_runs:Say", "--quiet").exit_code == 0
    assert " step 2/2 " in rlkit("runs").stdout


def test_a_killed_run_and_a_run_of_one_step_are_listed_as_such(run: toolkit.RunResult, rlkit: Command) -> None:
    lines = (run.directory / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.directory / "metrics.jsonl").write_text(lines[0])
    state = json.loads((run.directory / "run.json").read_text())
    (run.directory / "run.json").write_text(json.dumps({**state, "status": "running"}))
    line = rlkit("runs").stdout
    assert line.split()[:4] == ["first", "killed", "step", "1/2"]
    assert "→" not in line


def test_a_folder_without_runs_says_so(rlkit: Command) -> None:
    assert rlkit("runs").stdout.startswith("there are no runs in ")


def test_a_renamed_run_is_resumed_under_its_new_name(run: toolkit.RunResult, rlkit: Command) -> None:
    assert rlkit("runs", "mv", "first", "second").exit_code == 0
    assert not run.directory.exists()
    assert rlkit("doctor", "second").stdout.startswith("second is complete at step 2")


@pytest.mark.parametrize("name", ["../first", "a/b", "", ".", ".hidden", "first", "-x", "a\nb", "x" * 300])
def test_a_name_that_is_taken_or_no_folder_is_refused(run: toolkit.RunResult, rlkit: Command, name: str) -> None:
    assert rlkit("runs", "mv", "--", "first", name).exit_code == 2
    assert run.directory.exists()


def test_removed_runs_are_gone(run: toolkit.RunResult, rlkit: Command) -> None:
    assert rlkit("runs", "rm", "first").exit_code == 2  # nobody can confirm
    assert run.directory.exists()
    assert rlkit("runs", "rm", "first", "--yes").exit_code == 0
    assert not list(run.directory.parent.glob("*first*"))


def test_a_run_by_two_names_is_removed_once(run: toolkit.RunResult, rlkit: Command) -> None:
    link = run.directory.with_name("link")
    link.symlink_to(run.directory)
    refused = rlkit("runs", "rm", "first", "link", "--yes")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"{link} is a link to {run.directory}: give that folder" in refused.stderr
    link.unlink()
    result = rlkit("runs", "rm", "first", "first/../first", "--yes")
    assert (result.exit_code, result.stdout.count("removed ")) == (0, 1)
    assert not run.directory.exists()


def test_a_run_in_progress_is_neither_removed_nor_renamed(run: toolkit.RunResult, rlkit: Command) -> None:
    with (run.directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for arguments in (("rm", "first", "--yes"), ("mv", "first", "second")):
            result = rlkit("runs", *arguments)
            assert result.exit_code == 2
            assert "the run first is in progress: stop it first" in result.stderr
    assert run.directory.exists()


def test_a_checkpoint_answers_a_message(run: toolkit.RunResult, rlkit: Command) -> None:
    first = rlkit("chat", "first", "Hello", "--max-tokens", 6, "--json")
    assert first.exit_code == 0, first.stderr
    reply = json.loads(first.stdout)
    assert reply["message"]["role"] == "assistant"
    assert rlkit("chat", "first", "Hello", "--max-tokens", 6, "--json").stdout == first.stdout
    assert rlkit("chat", "first", "Hello", "--max-tokens", 6, "--json", "--seed", 1).stdout != first.stdout
    assert rlkit("chat", "first", "Hello", "--step", 9).exit_code == 2


def test_a_plain_text_is_completed_without_the_chat_format(run: toolkit.RunResult, rlkit: Command) -> None:
    async def complete() -> str:
        async with open_chat("first", Sampling(6, 0.0), note=lambda text: None) as begin:
            return (await begin().sample("1, 2,")).text

    options = ("--max-tokens", 6, "--temperature", 0, "--json")
    completed = json.loads(rlkit("chat", "first", "1, 2,", "--complete", *options).stdout)
    assert completed["message"]["content"] == asyncio.run(complete())
    assert json.loads(rlkit("chat", "first", "1, 2,", *options).stdout) != completed
    result = rlkit("chat", "first", "1, 2,", "--complete", "--system", "Count.")
    assert result.exit_code == 2
    assert "leave out --complete or --system" in result.stderr


def test_the_newest_checkpoint_of_a_run_is_evaluated(run: toolkit.RunResult, rlkit: Command, tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    envs = "eval: {envs: {arithmetic: {args: {max_operand: 2}, max_tokens: 2, tasks: 2}}}\nenvs: {arithmetic: {}}"
    config.write_text(f"model: {load_run_config(run.directory).model}\n{envs}\nsteps: 1\n")
    result = rlkit("eval", config, "--checkpoint", "first", "--json")
    assert result.exit_code == 0, result.stderr
    assert run.checkpoint is not None
    assert json.loads(result.stdout)["checkpoint"] == run.checkpoint.sampler
    assert rlkit("eval", config, "--checkpoint", "second").exit_code == 2


def test_a_conversation_takes_lines_until_the_end_of_its_input(run: toolkit.RunResult, rlkit: Command) -> None:
    from typer.testing import CliRunner

    from rlkit.cli.app import app

    lines = b"one\n\n/new\ntwo \xf0\x9f\n"
    result = CliRunner().invoke(app, ["chat", "first", "--max-tokens", "4", "--json"], input=lines, prog_name="rlkit")
    assert [line for line in result.stderr.splitlines() if line.startswith("> ")] == [
        "> one",
        "> /new",
        "> two \\xf0\\x9f",
    ]
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 2


def test_a_message_that_is_a_command_of_the_conversation_is_a_message(run: toolkit.RunResult, rlkit: Command) -> None:
    assert "assistant" in rlkit("chat", "first", "/new", "--max-tokens", 4, "--json").stdout
    assert rlkit("chat", "first", "a\udcff", "--max-tokens", 4).exit_code == 0
