"""Generated tasks about files: what their tests accept, and what keeps training and evaluation apart."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rlkit._util import threads
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs
from rlkit.envs.harbor import harbor
from rlkit.envs.harbor.checking import check_tasks
from rlkit.envs.harbor.generated.file_tasks import MAX_VARIANTS, NAMES, FileTask, FileTasksSettings, generate_file_tasks
from rlkit.envs.harbor.generated.task_folders import cache_file_tasks, make_task_files, write_file_tasks
from rlkit.envs.harbor.settings import make_environment
from rlkit.envs.harbor.tasks import find_tasks
from rlkit.errors import RlkitError, UsageError

from .conftest import cache, can_sandbox, sandbox_cache

__all__ = ["cache", "can_sandbox", "sandbox_cache"]

FEW = FileTasksSettings(variants=2, held_out=2)
TASKS = {task.task_id: task for task in generate_file_tasks(FEW)}


def reward(task: FileTask, folder: Path, *commands: str) -> str:
    """Play commands in a plain folder, and return what the tests say of it."""
    work, verdict = folder / "app", folder / "reward"
    for path, text in {**make_task_files(task), **{f"app/{path}": text for path, text in task.files.items()}}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    work.mkdir(exist_ok=True)
    for command in commands:
        subprocess.run(["bash", "-c", command], cwd=work, check=False, capture_output=True)
    tests = (folder / "tests" / "test.sh").read_text().replace("/app", str(work))
    script = tests.replace("/logs/verifier/reward.txt", str(verdict))
    subprocess.run(["bash", "-c", script], check=True, capture_output=True)
    return verdict.read_text().strip()


@pytest.mark.parametrize("task_id", TASKS)
def test_a_task_is_solved_by_its_solution_only(task_id: str, tmp_path: Path) -> None:
    task = TASKS[task_id]
    assert reward(task, tmp_path / "untouched") == "0"
    assert reward(task, tmp_path / "solved", *task.solution.splitlines()) == "1"


@pytest.mark.parametrize(
    ("kind", "commands"),
    [
        ("1-make-folder", ["touch {0}"]),
        ("1-make-folder", ["ln -s / {0}"]),
        ("1-delete-file", ["rm *"]),
        ("1-rename-file", ["cp {0} {1}"]),
        ("1-rename-file", ["touch {1}; rm {0}"]),
        ("1-copy-file", ["mv {0} {1}"]),
        ("1-copy-file", ["ln -s {0} {1}"]),
        ("1-copy-file", ["mkfifo {1}"]),
        ("1-copy-file", ["mkdir {1}; cp {0} {1}"]),
        ("1-write-word", ["echo {1} {0} > {1}"]),
        ("1-write-word", ["printf '{0}\\n\\n' > {1}"]),
        ("1-write-word", ["printf '{0}\\0' > {1}"]),
        ("2-append-word", ["echo {0} > {1}"]),
        ("2-append-word", ["printf {0} >> {1}; echo {0} >> {1}"]),
        ("2-empty-file", ["echo > {0}"]),
        ("2-empty-file", ["mkdir {0}"]),
        ("2-move-file", ["rm -r {1}; mv {0} {1}"]),
        ("2-move-file", ["cp {0} {1}"]),
        ("2-sort-lines", ["cp {0} {1}"]),
        ("2-sort-lines", ["sort {0} -o {0}; cp {0} {1}"]),
        ("3-two-commands", ["cd .."]),
        ("4-count-lines", ["wc -l {0} > {1}"]),
        ("4-folder-and-file", ["mkdir {0}"]),
        ("4-number-lines", ["seq 100 > {0}"]),
    ],
)
def test_a_partial_solution_earns_nothing(kind: str, commands: list[str], tmp_path: Path) -> None:
    task = TASKS[f"train/{kind}-00"]
    names = [
        name for name in re.findall(r"[a-z]+\.txt|[a-z]+", task.instruction) if name.split(".")[0] in NAMES["train"]
    ]
    assert names
    assert reward(task, tmp_path, *(command.format(*names) for command in commands)) == "0"


def test_one_command_of_two_earns_nothing(tmp_path: Path) -> None:
    task = TASKS["train/3-two-commands-00"]
    first, second = task.solution.splitlines()
    assert (reward(task, tmp_path / "first", first), reward(task, tmp_path / "second", second)) == ("0", "0")
    assert reward(task, tmp_path / "both", second, first) == "1"


def test_a_last_line_needs_no_newline(tmp_path: Path) -> None:
    task = TASKS["train/1-write-word-00"]
    (command,) = task.solution.splitlines()
    assert reward(task, tmp_path, command.replace("echo", "printf")) == "1"


def test_training_and_held_out_tasks_share_no_name_and_no_instruction() -> None:
    tasks = list(generate_file_tasks(FileTasksSettings(variants=MAX_VARIANTS, held_out=MAX_VARIANTS)))
    assert len({task.task_id for task in tasks}) == len(tasks) == 2 * 13 * MAX_VARIANTS
    assert len({task.instruction for task in tasks}) == len(tasks)
    assert not set(NAMES["train"]) & set(NAMES["held-out"])
    for task in tasks:
        part = task.task_id.partition("/")[0]
        (other,) = {"train", "held-out"} - {part}
        texts = [task.instruction, task.solution, *task.files, *task.files.values(), *task.checks]
        assert not set(re.findall("[a-z]+", " ".join(texts))) & set(NAMES[other]), task


def test_tasks_are_deterministic_and_a_larger_count_adds_tasks() -> None:
    assert list(generate_file_tasks(FEW)) == list(TASKS.values())
    more = {task.task_id: task for task in generate_file_tasks(FileTasksSettings(variants=5, held_out=3))}
    assert {task_id: more[task_id] for task_id in TASKS} == TASKS
    assert list(generate_file_tasks(FileTasksSettings(variants=2, held_out=2, seed=1))) != list(TASKS.values())


def test_folders_are_written_once_and_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path))
    folder = cache_file_tasks(FEW)
    stamp = (folder / "train").stat().st_mtime_ns
    assert cache_file_tasks(FEW) == folder
    assert (folder / "train").stat().st_mtime_ns == stamp
    assert cache_file_tasks(FileTasksSettings(variants=2, held_out=2, seed=1)) != folder
    assert not list((tmp_path / "file-tasks").glob("*.unfinished"))
    assert set(find_tasks(folder)) == set(TASKS)


def test_an_empty_folder_is_not_mistaken_for_generated_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path))
    folder = cache_file_tasks(FEW)
    shutil.rmtree(folder)
    folder.mkdir()
    assert set(find_tasks(cache_file_tasks(FEW))) == set(TASKS)


def test_a_non_empty_folder_is_rejected(tmp_path: Path) -> None:
    assert write_file_tasks(FEW, tmp_path / "new") == len(TASKS)
    with pytest.raises(UsageError, match=r"--to: .*new exists and is not empty"):
        write_file_tasks(FEW, tmp_path / "new")
    with pytest.raises(UsageError, match=r"--to: / exists and is not empty"):
        write_file_tasks(FEW, Path("/"))
    with pytest.raises(UsageError, match=r"--to: .*task\.toml.* lies in a file"):
        write_file_tasks(FEW, next((tmp_path / "new").rglob("task.toml")) / "x")


def test_a_configuration_selects_generated_tasks_by_level(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path))
    args = "{file_tasks: {variants: 3, held_out: 1}, task_ids: ['train/[12]-*'], agent: shell}"
    (tmp_path / "a.yaml").write_text(f"envs: {{terminal: {{env: harbor, args: {args}}}}}\n")
    spec = load_config([tmp_path / "a.yaml"]).config.envs["terminal"]
    tasks = load_envs("terminal", spec, field="envs.terminal", seed=0)
    assert isinstance(tasks, list)
    assert len(tasks) == 3 * 9
    assert {task.settings.agent.name for task in tasks} == {"shell"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("{file_tasks: {variants: 0}}", r"file_tasks\.variants: Input should be greater than or equal to 1"),
        ("{file_tasks: {seed: many}}", r"file_tasks\.seed: Input should be a valid integer"),
        ("{file_tasks: {varients: 3}}", r"file_tasks\.varients: unknown\. Did you mean 'variants'"),
        ("{file_tasks: {}, tasks_dir: .}", "tasks_dir, dataset or file_tasks: give one of them"),
        ("{file_tasks: {}, registry: a.json}", "registry has an effect only with dataset"),
    ],
)
def test_invalid_settings_are_errors(args: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"envs: {{t: {{env: harbor, args: {args}}}}}\n")
    spec = load_config([tmp_path / "a.yaml"]).config.envs["t"]
    with pytest.raises(RlkitError, match=message):
        load_envs("t", spec, field="envs.t", seed=0)


@pytest.mark.usefixtures("can_sandbox")
@pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning")  # by Harbor's own trial
def test_generated_tasks_are_sound_in_real_trials(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_file_tasks(FileTasksSettings(variants=1, held_out=1), tmp_path / "tasks")
    task_ids = ("train/2-move-file-00", "held-out/3-two-commands-00")
    tasks = {name: path for name, path in find_tasks(tmp_path / "tasks").items() if name in task_ids}
    checks = threads.run(check_tasks(tasks, environment=make_environment("local"), jobs=2))
    assert {check.task_id: (check.finding, check.detail, tuple(check.loopholes)) for check in checks} == dict.fromkeys(
        task_ids, ("sound", "", ())
    )


def test_the_environment_needs_one_source_of_tasks() -> None:
    with pytest.raises(UsageError, match="tasks_dir, dataset or file_tasks: give one of them"):
        harbor()
