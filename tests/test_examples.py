"""Every example runs, at small size, on a random model, without a download."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rlkit
from rlkit.errors import MissingError
from rlkit.testing import ScriptedPolicy
from tests.limits import HANG_S

from .sandbox.conftest import cache, can_sandbox, sandbox_cache

__all__ = ["cache", "can_sandbox", "sandbox_cache"]

EXAMPLES = Path(__file__).parent.parent / "examples"
LONGEST_LINES = 80


def load(path: str) -> object:
    from rlkit.config.loading.objects import load_object

    return load_object(f"{EXAMPLES.parent}/{path}", field="envs")


def metrics(runs: Path) -> list[dict[str, float]]:
    (run,) = [path for path in runs.iterdir() if (path / "run.json").exists()]
    assert json.loads((run / "run.json").read_text())["status"] == "completed"
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("path", [path for path in sorted(EXAMPLES.iterdir()) if path.suffix in (".py", ".yaml")])
def test_an_example_is_one_short_file(path: Path) -> None:
    assert len(path.read_text().splitlines()) < LONGEST_LINES


@pytest.mark.parametrize("path", sorted((EXAMPLES / "agents").glob("*.*")), ids=lambda path: path.name)
def test_an_example_of_an_agent_names_the_packages_that_the_checks_install(path: Path) -> None:
    text = path.read_text()
    packages = re.findall(r"--with (\S+)", text)
    assert f"rlkit train examples/agents/{path.stem}.yaml" in text
    assert bool(packages) == (path.stem != "command_line_agent")
    checks = (EXAMPLES.parent / ".ci" / "run").read_text()
    assert [package for package in packages if f"--with {package}" in checks] == packages


@pytest.mark.parametrize("path", sorted((EXAMPLES / "agents").glob("*.py")), ids=lambda path: path.name)
def test_an_example_of_an_agent_imports_nothing_while_it_plays(path: Path) -> None:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AsyncFunctionDef)]
    statements = [statement for function in functions for statement in ast.walk(function)]
    assert not [statement for statement in statements if isinstance(statement, ast.Import | ast.ImportFrom)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["custom_env.py", "self_play.py", "multi_turn.py"])
def test_a_script_trains(name: str, byte_model_dir: Path, tmp_path: Path) -> None:
    small = ["--steps", "1", "--groups", "2", "--model", str(byte_model_dir)]
    environ = {**os.environ, "RLKIT_RUNS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *small], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mean reward" in done.stdout
    assert metrics(tmp_path)[-1]["step"] == 1


@pytest.mark.slow
def test_a_prompted_model_is_distilled_into_itself(
    byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    settings = {"batch": {"groups": 2, "group_size": 2}, "optimizer": {"learning_rate": 1e-3}, "trackers": []}
    result = rlkit.train(EXAMPLES / "distillation.yaml", model=str(byte_model_dir), steps=2, **settings)
    assert result.steps == 2
    before, _, after = metrics(tmp_path)
    assert before["eval/held_out/teacher/kl"] > 0
    assert after["teacher/v1"] > 0
    assert after["optim/sequences"] == 4


@pytest.mark.parametrize("name", ["arithmetic.yaml", "arithmetic_hard.yaml"])
def test_a_configuration_trains(
    name: str, byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    evaluation = {"envs": {"arithmetic": {"tasks": 2}}}
    batch = {"groups": 2, "group_size": 2}
    result = rlkit.train(EXAMPLES / name, model=str(byte_model_dir), steps=1, batch=batch, eval=evaluation, trackers=[])
    assert result.steps == 1
    before, after = metrics(tmp_path)
    assert before["eval/arithmetic/episodes"] == after["eval/arithmetic/episodes"] == 2
    assert after["env/arithmetic/episodes"] == 4


def test_a_search_for_constructions_trains_though_the_model_writes_no_program(
    byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    batch, sampling = {"groups": 2, "group_size": 2}, {"max_tokens": 8}
    path = EXAMPLES / "erdos.yaml"
    try:
        result = rlkit.train(path, model=str(byte_model_dir), steps=1, batch=batch, sampling=sampling, trackers=[])
    except MissingError as error:  # the kernel cannot keep programs apart
        pytest.skip(str(error))
    assert result.steps == 1
    (line,) = metrics(tmp_path)
    assert (line["env/erdos/episodes"], line["env/erdos/end/no_code"], line["env/erdos/reward/mean"]) == (4, 1, 0)


def test_the_examples_of_discovery_are_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlkit.config.loading.load import load_config
    from rlkit.config.loading.objects import load_envs
    from rlkit.envs.discovery.source import Discovery

    monkeypatch.chdir(EXAMPLES.parent)
    erdos = ("erdos.yaml", "erdos_small.yaml", "erdos_templates.yaml", "erdos_ttt.yaml", "erdos_ttt_discover.yaml")
    for name in (*erdos, "circle_packing.yaml"):
        ((key, spec),) = load_config([EXAMPLES / name]).config.envs.items()
        source = load_envs(key, spec, field=f"envs.{key}", seed=0)
        assert isinstance(source, Discovery)
        assert source.next().prompt()


@pytest.mark.slow
@pytest.mark.usefixtures("can_sandbox")
@pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning")
def test_a_configuration_trains_in_real_trials(
    byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    monkeypatch.chdir(EXAMPLES.parent)
    batch = {"groups": 1, "group_size": 2}
    path = EXAMPLES / "harbor_local.yaml"
    sampling = {"max_tokens": 4}
    result = rlkit.train(path, model=str(byte_model_dir), steps=1, batch=batch, sampling=sampling, trackers=[])
    assert result.steps == 1
    (line,) = metrics(tmp_path)
    assert (line["env/terminal/episodes"], line["env/terminal/failed"]) == (2, 0)
    assert line["env/terminal/seconds/verifier"] > 0
    assert line["env/terminal/agent_turns"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("can_sandbox")
@pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning")
def test_a_configuration_trains_and_evaluates_the_shell_agent_on_tasks_of_its_own(
    byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    small = {"steps": 1, "batch": {"groups": 1, "group_size": 2}, "sampling": {"max_tokens": 4}}
    evaluation = {"envs": {"held_out": {"tasks": 1, "attempts": 1}}}
    path = EXAMPLES / "terminal_small.yaml"
    result = rlkit.train(path, model=str(byte_model_dir), eval=evaluation, trackers=[], **small)  # pyright: ignore
    assert result.steps == 1
    before, line = metrics(tmp_path)
    assert before["eval/held_out/episodes"] == line["eval/held_out/episodes"] == 1
    assert (line["env/terminal/episodes"], line["env/terminal/failed"]) == (2, 0)
    assert (line["env/terminal/agent_turns"], line["env/terminal/truncated_turns"]) == (1, 1)
    assert line["env/terminal/seconds/verifier"] > 0


@pytest.mark.usefixtures("can_sandbox", "cache")
def test_a_command_line_agent_trains(byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    monkeypatch.chdir(EXAMPLES.parent)
    small = {"steps": 2, "batch": {"groups": 1, "group_size": 2}, "sampling": {"max_tokens": 4}}
    path = EXAMPLES / "agents" / "command_line_agent.yaml"
    result = rlkit.train(path, model=str(byte_model_dir), trackers=[], **small)  # pyright: ignore
    assert result.steps == 2
    for line in metrics(tmp_path):
        assert (line["env/shopping/episodes"], line["env/shopping/failed"]) == (2, 0)
        assert line["env/shopping/turns"] >= 1


@pytest.mark.parametrize("name", ["terminal_bench.yaml", "papergym.yaml"])
def test_a_configuration_of_terminal_tasks_says_the_same_of_both_halves(name: str) -> None:
    from rlkit.config.loading.load import load_config

    config = load_config([EXAMPLES / name]).config
    (trained,), (evaluated,) = config.envs.values(), config.eval.envs.values()
    assert (trained.args["split"], evaluated.args["split"]) == ("train", "eval")
    common = trained.args.keys() & evaluated.args.keys() - {"split"}
    assert {"eval_fraction", "environment", "max_turns"} <= common
    assert all(trained.args[key] == evaluated.args[key] for key in common)


@pytest.mark.slow
def test_two_servers_are_trained_on_at_once_and_the_run_is_resumed(
    byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rlkit.config.loading.load import load_config

    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    monkeypatch.chdir(EXAMPLES.parent)
    path = EXAMPLES / "openreward_local.yaml"
    envs = load_config([path]).config.envs
    from rlkit.envs.openreward.connection.servers import local_server

    # Held, so that the second run need not start them again.
    commands = [str(spec.args["server"]) for spec in envs.values()]
    servers = [local_server(command, within_s=HANG_S) for command in commands]
    small = {"model": str(byte_model_dir), "name": "both", "batch": {"groups": 6, "group_size": 2}, "trackers": []}
    evaluation = {"envs": {"words": {"tasks": 2, "max_tokens": 4}}}
    for steps in (1, 2):
        result = rlkit.train(path, steps=steps, eval=evaluation, resume=steps > 1, **small)  # pyright: ignore
        assert result.steps == steps
    before, first, second = metrics(tmp_path)
    assert before["eval/words/episodes"] == 2
    for name in ("env/words/episodes", "env/shop/episodes"):
        assert first.get(name, 0) + second.get(name, 0) > 0
    tasks = json.loads((tmp_path / "both" / "tasks.json").read_text())
    assert tasks["envs.shop"]["sizes"] == {"train": 200}
    assert len(servers) == 2


def test_the_hard_arithmetic_is_tested_on_sums_that_are_never_trained_on() -> None:
    from rlkit.config.loading.load import load_config
    from rlkit.config.loading.objects import load_envs

    config = load_config([EXAMPLES / "arithmetic_hard.yaml"]).config
    spec, held_out = config.envs["arithmetic"], config.eval.envs["arithmetic"]
    trained = load_envs("arithmetic", spec, field="envs.arithmetic", seed=0)
    tested = load_envs("arithmetic", held_out, field="eval.envs.arithmetic", seed=0)
    assert isinstance(trained, list)
    assert isinstance(tested, list)
    assert len(trained) > 1000
    assert not {env.task_id for env in trained} & {env.task_id for env in tested}


async def play(env: rlkit.Env, *replies: str) -> tuple[float, bool]:
    outcome = await env.rollout(ScriptedPolicy(replies))
    return (outcome.reward, outcome.truncated) if isinstance(outcome, rlkit.Outcome) else (outcome, False)


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        (["5"], (1.0, False)),
        (["4", "6", "5"], (1.0, False)),
        (["1", "2", "3"], (0.0, True)),  # sensible, and not found
        (["4", "3", "5"], (0.9, False)),  # 3 was ruled out by the hint
        (["four", "44", ""], (-0.3, True)),
    ],
)
def test_the_guessing_game_pays_for_the_number_and_takes_for_senseless_guesses(
    replies: list[str], expected: tuple[float, bool]
) -> None:
    import asyncio

    game = load("examples/multi_turn.py:Guess")
    assert callable(game)
    reward, truncated = asyncio.run(play(game(5), *replies))
    assert (pytest.approx(reward), truncated) == expected


@pytest.mark.parametrize(
    ("pile", "begins", "replies", "reward", "metrics"),
    [
        (5, True, ["1", "2", "2"], 1.0, {"legal": 1.0, "best_moves": 1.0}),  # 5 - 1, - 2, and the player takes the last
        (5, True, ["2", "3"], 0.0, {"legal": 1.0, "best_moves": 0.0}),
        (5, True, ["x"], 0.0, {"legal": 0.0, "best_moves": 0.0}),
        (5, False, ["4"], 1.0, {"legal": 1.0}),  # the opponent breaks the rules
        (6, False, ["3", "3"], 1.0, {"legal": 1.0, "best_moves": 1.0}),
        (5, False, ["3", "3"], 0.0, {"legal": 0.0, "best_moves": 0.0}),  # more than are left
    ],
)
def test_the_game_of_two_players_is_won_with_the_last_stick(
    pile: int, begins: bool, replies: list[str], reward: float, metrics: dict[str, float]
) -> None:
    import asyncio

    game = load("examples/self_play.py:Nim")
    assert callable(game)
    policy = ScriptedPolicy(replies)
    outcome = asyncio.run(game(pile, begins).rollout(policy))
    assert (outcome.reward, dict(outcome.metrics)) == (reward, metrics)
    assert [turn.frozen for turn in policy.turns] == [begins == bool(n % 2) for n in range(len(replies))]


@pytest.mark.parametrize("path", ["examples/custom_env.py:words", "examples/multi_turn.py:games"])
def test_an_example_keeps_the_promises_of_an_environment(path: str) -> None:
    import asyncio

    from rlkit.check import check

    tasks = load(path)
    assert callable(tasks)
    report = asyncio.run(check(tasks(), tasks=2))
    assert report.ok, [finding for finding in report.findings if finding.status == "failed"]


@pytest.mark.slow
def test_the_notebook_runs(byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path))
    monkeypatch.setenv("RLKIT_NOTEBOOK_MODEL", str(byte_model_dir))
    monkeypatch.setenv("RLKIT_NOTEBOOK_STEPS", "2")
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=HANG_S, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2]


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
