from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs
from rlkit.envs.harbor import harbor
from rlkit.envs.harbor.settings import LOCAL_SANDBOX, Agent, TrialSettings, make_environment
from rlkit.envs.harbor.task import HarborTask
from rlkit.errors import RlkitError, UsageError
from rlkit.types import Json

from .conftest import write_task


def test_an_environment_is_local_or_a_harbor_type_or_a_class() -> None:
    assert make_environment("local", {"memory_mb": 512}).import_path == LOCAL_SANDBOX
    assert (make_environment("modal").type, make_environment("modal").import_path) == ("modal", None)
    assert make_environment("docker", {"x": 1}, cpus=2).kwargs == {"x": 1}
    import_path = "tests.envs.harbor.environments:SlowToStop"
    assert make_environment(import_path).import_path == import_path


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("dokcer", {}, r"environment: there is no 'dokcer'\. Did you mean 'docker'\? Known: local, docker, podman, "),
        ("nowhere.at.all:Sandbox", {}, "environment: there is no module 'nowhere.at.all'"),
        ("local", {"memory_mb": "lots"}, r"environment_kwargs\.memory_mb: .*integer"),
        ("local", {"processes": 0}, r"environment_kwargs\.processes: .*greater than 0"),
        ("beaker", {"workspce": "a/b"}, r"environment_kwargs\.workspce: unknown\. Did you mean 'workspace'"),
        ("beaker", {"priority": "hgh"}, r"environment_kwargs\.priority: .*'low'"),
        ("local", {"memory": 1}, r"environment_kwargs\.memory: .* Did you mean 'memory_mb'"),
    ],
)
def test_a_missing_environment_is_an_error(name: str, kwargs: dict[str, Json], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_environment(name, kwargs)


def test_each_agent_option_has_one_place() -> None:
    options = Agent(max_turns=3, parser="xml", kwargs={"interleaved_thinking": True}).options
    assert options == {
        "max_turns": 3,
        "parser_name": "xml",
        "enable_summarize": False,
        "interleaved_thinking": True,
    }
    assert "max_turns" not in Agent().options, "no limit where nothing is said"
    with pytest.raises(UsageError, match="agent_kwargs: parser_name cannot be set here; set parser instead"):
        Agent(kwargs={"parser_name": "xml"})


def test_trials_are_kept_in_a_folder_that_is_named() -> None:
    with pytest.raises(UsageError, match="keep_trials: failed needs a folder for the trials: set trials_dir"):
        TrialSettings(keep="failed")


def test_a_configuration_gives_tasks(tmp_path: Path) -> None:
    for number in range(3):
        write_task(tmp_path / f"task-{number}")
    args = f"{{tasks_dir: {tmp_path}, task_ids: ['*-[12]'], max_turns: 5, on_overflow: mask, environment: docker}}"
    (tmp_path / "a.yaml").write_text(f"envs: {{terminal: {{env: harbor, args: {args}}}}}\n")
    spec = load_config([tmp_path / "a.yaml"]).config.envs["terminal"]
    loaded = load_envs("terminal", spec, field="envs.terminal", seed=0)
    assert isinstance(loaded, list)
    tasks = [task for task in loaded if isinstance(task, HarborTask)]
    assert {task.task_id for task in tasks} == {"task-1", "task-2"}
    assert tasks[0].settings.agent.max_turns == 5
    assert tasks[0].settings.rules.overflow == "mask"
    assert tasks[0].settings.environment.type == "docker"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "tasks_dir, dataset or file_tasks: give one of them"),
        ({"tasks_dir": ".", "registry": "r.json"}, "registry has an effect only with dataset"),
        ({"tasks_dir": ".", "on_environment_error": "zero"}, "on_environment_error: zero would punish"),
        ({"dataset": "a@b@c"}, "dataset: 'a@b@c' is not of the form name@version"),
    ],
)
def test_an_invalid_setting_is_named(settings: dict[str, str], message: str) -> None:
    with pytest.raises(RlkitError, match=message):
        harbor(**settings)  # type: ignore[arg-type]  as a configuration gives them
