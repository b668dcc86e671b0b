from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlkit.cli.common.output import Output
from rlkit.cli.train import train
from rlkit.errors import RunFailed
from rlkit.trackers import Progress, RunInfo, RunResult, Tracker
from rlkit.types import Checkpoint

CONFIG = "envs: {arithmetic: {}}\nsteps: 3\n"
SAVED = Checkpoint(2, "tinker://x/weights/step-2", "tinker://x/sampler_weights/step-2")
METRICS = {"env/arithmetic/reward/mean": 0.5, "time/step_s": 1.0}


class FakeTrainer:
    """Tells its trackers what a run would, and ends as `outcome` says."""

    outcome: RunResult | Exception
    last_resolved: Any
    resumed: Path | None

    def __init__(
        self, resolved: Any, *, trackers: Sequence[Tracker], stop: Any, directory: Path | None, resume: bool
    ) -> None:
        FakeTrainer.last_resolved = resolved
        FakeTrainer.resumed = directory if resume else None
        self._trackers = trackers

    async def train(self) -> RunResult:
        for tracker in self._trackers:
            tracker.on_start(
                RunInfo("first", Path("/runs/first"), "m", ("arithmetic",), "s", lambda: Progress(steps=3))
            )
            tracker.on_note("a note")
            tracker.on_step(1, METRICS)
            tracker.on_step(2, {**METRICS, "service/loss": float("nan")})
        print("an environment that prints")
        if isinstance(FakeTrainer.outcome, Exception):
            raise FakeTrainer.outcome
        return FakeTrainer.outcome


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rlkit.training.trainer.RLTrainer", FakeTrainer)
    FakeTrainer.outcome = RunResult("first", Path("/runs/first"), "completed", 3, METRICS, SAVED)
    (tmp_path / "a.yaml").write_text(CONFIG)


def test_a_run_prints_its_steps_on_stderr_and_its_result_on_stdout(rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", "a.yaml")
    assert result.exit_code == 0
    assert "step 1/3  arithmetic 0.50  1.0 s\n" in result.stderr
    assert "a note\n" in result.stderr
    assert "\ncompleted: 3 steps\nrun           /runs/first\n" in result.stdout
    assert "rlkit view /runs/first" in result.stdout
    assert SAVED.state in result.stdout
    assert SAVED.sampler in result.stdout


def test_json_is_one_object_a_step_and_the_result_last(rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", "a.yaml", "--json")
    first, second, last = [json.loads(line) for line in result.stdout.splitlines()]
    assert first == {"step": 1, **METRICS}
    assert second["service/loss"] is None
    assert (last["status"], last["steps"], last["run"]) == ("completed", 3, "first")
    assert last["checkpoint"]["state"] == SAVED.state
    assert "an environment that prints" in result.stderr


def test_quiet_prints_only_the_result(rlkit: Callable[..., Any]) -> None:
    result = rlkit("train", "a.yaml", "--quiet")
    assert result.stderr == ""
    assert "completed" in result.stdout


def test_overrides_and_the_name_win_over_the_files(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("seed: 4\n")
    assert rlkit("train", "a.yaml", "b.yaml", "steps=7", "name=x", "--name", "2024").exit_code == 0
    config = FakeTrainer.last_resolved.config
    assert (config.steps, config.seed, config.name) == (7, 4, "2024")


def test_a_file_may_have_an_equals_sign_in_its_name(rlkit: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "lr=1.yaml").write_text(CONFIG)
    assert rlkit("train", "lr=1.yaml", "steps=9").exit_code == 0
    assert FakeTrainer.last_resolved.config.steps == 9


def test_a_run_that_used_up_its_budget_is_4_and_says_how_to_go_on(rlkit: Callable[..., Any]) -> None:
    reason = "budget_tokens: 1,200 of 1,000 tokens are used"
    FakeTrainer.outcome = RunResult("first", Path("/runs/first"), "budget", 2, METRICS, SAVED, reason)
    result = rlkit("train", "a.yaml", "steps=3")
    assert result.exit_code == 4
    assert "\nout of budget: 2 steps\nrun           /runs/first\n" in result.stdout
    assert "to resume: rlkit resume /runs/first budget_tokens=…\n" in result.stderr


def test_an_interrupted_run_is_130_and_says_how_to_go_on(rlkit: Callable[..., Any]) -> None:
    FakeTrainer.outcome = RunResult("first", Path("/runs/first"), "interrupted", 2, METRICS, SAVED)
    result = rlkit("train", "a.yaml", "steps=3", "seed=1", "--json")
    assert result.exit_code == 130
    assert "to resume: rlkit resume /runs/first\n" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["status"] == "interrupted"


def test_a_run_is_resumed_by_name_or_folder_with_what_is_to_be_different(
    rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "config.yaml").write_text(CONFIG)
    for named in ("first", str(folder)):
        assert rlkit("resume", named, "steps=9").exit_code == 0
        assert (FakeTrainer.resumed, FakeTrainer.last_resolved.config.steps) == (folder, 9)
        assert FakeTrainer.last_resolved.config.name == "first"


def test_a_run_of_tasks_from_python_is_resumed_there(
    rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "run.json").write_text("{}")
    (tmp_path / "first" / "config.yaml").write_text("envs: {Words: {env: null}}")
    result = rlkit("resume", "first")
    assert result.exit_code == 2
    assert "the tasks of Words were passed in Python: resume the run there, with rlkit.train(…, name='first'" in (
        result.stderr
    )


def test_a_run_that_is_not_there_is_2(rlkit: Callable[..., Any]) -> None:
    result = rlkit("resume", "nothing")
    assert result.exit_code == 2
    assert "there is no run 'nothing'" in result.stderr


def test_train_resumes_the_named_run_if_there_is_one(
    rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))
    assert rlkit("train", "a.yaml", "--resume").exit_code == 2  # which run?
    assert rlkit("train", "a.yaml", "--resume", "--name", "first").exit_code == 0
    assert FakeTrainer.resumed is None


def test_a_failed_run_is_1(rlkit: Callable[..., Any]) -> None:
    FakeTrainer.outcome = RunFailed("all 16 rollouts of step 3 failed; the first: KeyError: 'x'")
    result = rlkit("train", "a.yaml")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: all 16 rollouts")
    assert result.stdout == "an environment that prints\n"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("envs: {arithmetic: {}}\nstep: 3\n", []),
        ("envs: {arithmetic: {}}\nsteps: -3\n", []),
        ("envs: {arithmetic: {}}\nsteps: many\n", []),
        ("envs: {arithmetik: {}}\n", []),
        ("envs: {arithmetic: {}}\nmodel: tml-abcdefghijklmnopqrstuvwxyz012345\n", []),
        ("[1, 2]\n", []),
        ("a: [\n", []),
        (CONFIG, ["no-such-file.yaml"]),
        (CONFIG, ["."]),
        (CONFIG, ["steps="]),
        (CONFIG, ["=3"]),
        (CONFIG, ["a.b.c=3"]),
        (CONFIG, ["--name", "../up"]),
        (CONFIG, ["--name", ""]),
    ],
)
def test_a_hostile_configuration_is_2_and_one_clear_line(
    text: str, arguments: list[str], rlkit: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "arithmetik" in text:
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text(text)
    result = rlkit("train", "bad.yaml", *arguments, "--quiet")
    assert result.exit_code == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert "abcdefghij" not in result.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_on_terminal(*, out: io.StringIO, json: bool = False, **options: bool) -> str:
    terminal = Terminal()
    train(Output(out, terminal, json=json), ["a.yaml"], **options)
    return terminal.getvalue()


@pytest.fixture
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("_terminal")
def test_a_terminal_gets_the_panel_and_everyone_else_lines() -> None:
    assert "rollouts" in run_on_terminal(out=io.StringIO())
    lines = run_on_terminal(out=io.StringIO(), no_panel=True)
    assert "rollouts" not in lines
    assert "step 1/3" in lines
    assert run_on_terminal(out=io.StringIO(), quiet=True) == ""


@pytest.mark.usefixtures("_terminal")
def test_json_on_the_same_terminal_is_not_torn_by_a_panel() -> None:
    out = Terminal()
    assert "rollouts" not in run_on_terminal(out=out, json=True)
    assert json.loads(out.getvalue().splitlines()[0])["step"] == 1


@pytest.mark.usefixtures("_terminal")
def test_json_into_a_pipe_leaves_the_panel_on_the_terminal() -> None:
    out = io.StringIO()
    assert "rollouts" in run_on_terminal(out=out, json=True)
    assert json.loads(out.getvalue().splitlines()[-1])["status"] == "completed"


@pytest.mark.usefixtures("_terminal")
def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run_on_terminal(out=io.StringIO())


@pytest.mark.usefixtures("_terminal")
def test_no_color_keeps_the_panel_without_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    output = run_on_terminal(out=io.StringIO())
    assert "rollouts" in output
    assert "\x1b[36m" not in output
    assert "\x1b[32m" not in output
