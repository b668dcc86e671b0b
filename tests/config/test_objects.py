from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from rlkit.config.loading.objects import load_envs, load_object
from rlkit.config.schema.envs import EnvConfig, EvalEnvConfig
from rlkit.env import Env
from rlkit.errors import ConfigError, MissingError

MY_ENV = """
from __future__ import annotations

import helper
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

import rlkit.env
from rlkit.errors import MissingError, UsageError


class Reverse(rlkit.env.Env):
    def __init__(self, word: str = "x"):
        self.word = word

    async def rollout(self, policy):
        return 1.0


@dataclass
class Spell(rlkit.env.Env):
    word: str

    async def rollout(self, policy):
        return 1.0


class Bare(rlkit.env.Env):
    async def rollout(self, policy):
        return 1.0


class Source(rlkit.env.TaskSource):
    def __init__(self, seed: int): self.seed = seed
    def next(self): return TASK
    def observe(self, group): pass
    def state_dict(self): return {}
    def load_state_dict(self, state): pass


class Nested:
    class Inner(Reverse):
        pass


type Grader = Callable[[str], float]


def many(
    n: Annotated[int, Field(ge=1)],
    *,
    mode: Literal["train", "test"] = "train",
    path: Path | None = None,
    grader: Grader | None = None,
    seed: int = 0,
    unknown_type: "Nowhere" = None,
):
    many.last = (n, mode, path, grader, seed)
    return (Reverse(str(index)) for index in range(n))


def tells(count: int = 1, note: Callable[[str], None] = print):
    note(f"{count} tasks")
    return [Reverse()] * count


def annotates(note: str = "mine"):
    return [Reverse(note)]


def late():
    import late_helper
    return [Reverse(late_helper.WORD)]


def unfinished():
    yield Reverse()
    raise KeyError("inside")


def fails(x: str = "", api_key: str = ""):
    raise ValueError(f"no {x} {api_key}")


def refuses(): raise UsageError("split: there is no such split")
def lacks(): raise MissingError("install it")
def keywords(**given): return [Reverse(str(given))]
def empty(): return []
def none(): return None
def text(): return "abc"
def mapping(): return {"a": TASK}
def strings(): return ["a"]
def classes(): return [Reverse]
def a_class(): return Reverse
async def coroutine(): return [Reverse()]
def endless():
    while True:
        yield TASK

def grade(text): return 1.0

TASK = Reverse()
TASKS = [Reverse("a"), Reverse("b")]
FIVE = 5
"""


@pytest.fixture(autouse=True)
def my_env(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("helper", "late_helper", "extra_pkg"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (folder / "my_env.py").write_text(MY_ENV)
    (folder / "helper.py").touch()
    (folder / "late_helper.py").write_text("WORD = 'late'")
    return folder / "my_env.py"


def load_all(name: str, **args: object) -> Sequence[Env]:
    spec = EnvConfig.model_validate({"env": f"my_env.py:{name}", "args": args})
    return cast("Sequence[Env]", load_envs("x", spec, field="envs.x", seed=7))


def rejection_message(env: str | None, args: Mapping[str, object] | None = None, *, name: str = "x") -> str:
    with pytest.raises(ConfigError) as caught:
        load_envs(name, EnvConfig.model_validate({"env": env, "args": args or {}}), field=f"envs.{name}", seed=7)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def word_of(task: Env) -> str:
    return cast("str", getattr(task, "word"))  # noqa: B009  the class is known only to the file


def test_a_class_a_function_a_list_and_an_object_all_give_tasks() -> None:
    assert [word_of(task) for task in load_all("Reverse", word="abc")] == ["abc"]
    assert [word_of(task) for task in load_all("Spell", word="abc")] == ["abc"]
    assert [word_of(task) for task in load_all("many", n=3)] == ["0", "1", "2"]
    assert [word_of(task) for task in load_all("keywords", a=1)] == ["{'a': 1}"]
    assert [word_of(task) for task in load_all("TASKS")] == ["a", "b"]
    assert [word_of(task) for task in load_all("TASK")] == ["x"]
    assert [word_of(task) for task in load_all("Nested.Inner", word="in")] == ["in"]
    assert len(load_all("Bare")) == 1


def test_task_source_is_used_unchanged_and_gets_the_seed() -> None:
    assert getattr(load_all("Source"), "seed") == 7  # noqa: B009
    assert getattr(load_all("Source", seed=3), "seed") == 3  # noqa: B009


def test_environment_function_can_note_messages() -> None:
    notes = list[str]()
    for name in ("tells", "annotates"):
        spec = EnvConfig.model_validate({"env": f"my_env.py:{name}"})
        (task,) = load_envs("x", spec, field="envs.x", seed=7, note=notes.append)
    assert notes == ["envs.x: 1 tasks"]
    assert word_of(task) == "mine"  # an argument of the same name that is no function is the user's own


def test_arguments_take_the_types_of_their_annotations(folder: Path) -> None:
    load_all("many", n=1, mode="test", path="a/b", grader="my_env.py:grade", unknown_type=[1])
    many, grade = load_object("my_env.py:many", field="f"), load_object("my_env.py:grade", field="f")
    assert getattr(many, "last") == (1, "test", Path("a/b"), grade, 7)  # noqa: B009
    assert len(load_all("many", n="2", seed=5)) == 2  # text is what an environment variable gives


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("many", {"n": 1, "moode": 1}, "envs.x.args.moode: unknown argument. Did you mean 'mode'?"),
        ("Bare", {"word": 1}, "envs.x.args.word: unknown argument. Known: none"),
        ("many", {}, "envs.x.args.n: is required"),
        ("Spell", {}, "envs.x.args.word: is required"),
        ("many", {"n": "three"}, "envs.x.args.n: expected an integer, found a string"),
        ("many", {"n": True}, "envs.x.args.n: expected an integer, found true or false"),
        ("many", {"n": 1.5}, "envs.x.args.n: expected an integer, found a number"),
        ("many", {"n": 0}, "envs.x.args.n: expected at least 1"),
        ("many", {"n": 1, "mode": "tets"}, "envs.x.args.mode: expected 'train' or 'test'. Did you mean 'test'?"),
        ("many", {"n": 1, "path": [1]}, "envs.x.args.path: expected a string, found a list"),
        ("many", {"n": 1, "grader": "my_env.py:FIVE"}, "envs.x.args.grader: expected the import path of a function"),
        (
            "many",
            {"n": 1, "grader": "my_env.py:grad"},
            "envs.x.args.grader: my_env.py has no 'grad'. Did you mean 'grade'?",
        ),
        ("TASK", {"word": "a"}, "envs.x.args: my_env.py:TASK is not a function or class"),
    ],
)
def test_invalid_argument_is_named(name: str, args: Mapping[str, object], message: str) -> None:
    assert rejection_message(f"my_env.py:{name}", args).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "returned a collection without tasks: there must be at least one Env"),
        ("none", "returned None: it must be an Env, a collection of Envs or a TaskSource"),
        ("text", "returned a value of type str"),
        ("mapping", "returned a value of type dict"),
        ("strings", "returned a collection whose item 0 is a value of type str: each must be an Env"),
        ("classes", "returned a collection whose item 0 is the class Reverse"),
        ("a_class", "returned the class Reverse itself"),
        ("coroutine", "returned a coroutine, as it is an async function"),
        ("FIVE", "my_env.py:FIVE is a value of type int"),
        ("endless", "more than 1000000 tasks: use a TaskSource"),
        ("fails", "envs.x: my_env.py:86: ValueError: no "),
        ("unfinished", "envs.x: my_env.py:82: KeyError: 'inside'"),
        ("refuses", "envs.x: split: there is no such split"),
        ("Revers", "envs.x.env: my_env.py has no 'Revers'. Did you mean 'Reverse'?"),
    ],
)
def test_object_without_tasks_is_an_error_with_its_place(name: str, message: str) -> None:
    assert message in rejection_message(f"my_env.py:{name}")


def test_missing_error_of_user_code_is_not_changed() -> None:
    with pytest.raises(MissingError, match="install it"):
        load_all("lacks")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("broken.py:x", "envs.x.env: broken.py:2: NameError: name 'nope' is not defined"),
        ("syntax.py:x", "envs.x.env: syntax.py:1: SyntaxError: '(' was never closed"),
        ("leaves.py:x", "envs.x.env: leaves.py:1: SystemExit: 3"),
        ("needs.py:x", "envs.x.env: needs.py:1: ModuleNotFoundError: No module named 'not_installed'"),
        ("my_evn.py:x", "envs.x.env: there is no file 'my_evn.py' in {folder}. Did you mean 'my_env.py'?"),
        ("my_env.py", "'my_env.py' is not of the form package.module:name or file.py:name: add the name of an object"),
        ("not_there.envs:x", "there is no module 'not_there.envs': install its package"),
        ("os.not_there:x", "there is no module 'os.not_there'"),
        ("os:not_there", "os has no 'not_there'"),
        ("a b:c", "'a b:c' is not of the form"),
        (":x", "':x' is not of the form"),
        ("arithmatic", "there is no environment 'arithmatic'. Did you mean 'arithmetic'? Built in: arithmetic"),
    ],
)
def test_load_failure_names_the_line_of_user_code(folder: Path, path: str, message: str) -> None:
    (folder / "broken.py").write_text("x = 1\ny = nope\n")
    (folder / "syntax.py").write_text("x = (\n")
    (folder / "leaves.py").write_text("import sys; sys.exit(3)\n")
    (folder / "needs.py").write_text("import not_installed\n")
    assert message.replace("{folder}", str(folder)) in rejection_message(path)
    assert not [name for name in sys.modules if name.startswith(("rlkit_user_broken", "rlkit_user_leaves"))]


def test_unknown_environment_name_suggests_built_in_ones() -> None:
    message = rejection_message(None, name="arithmetc")
    assert message.startswith("envs.arithmetc: there is no environment 'arithmetc'. Did you mean 'arithmetic'?")
    assert "set envs.arithmetc.env to package.module:name or file.py:name" in message


def test_built_in_environment_is_checked_like_others() -> None:
    tasks = load_envs("arithmetic", EvalEnvConfig(args={"count": 5}), field="eval.envs.arithmetic", seed=1)
    assert len(cast("Sequence[Env]", tasks)) == 5
    assert (
        rejection_message(None, {"max_operand": 0}, name="arithmetic")
        == "envs.arithmetic.args.max_operand: expected at least 1"
    )


def test_a_task_from_a_file_can_be_pickled_and_the_file_is_loaded_once(my_env: Path) -> None:
    task = load_all("Reverse", word="abc")[0]
    assert word_of(pickle.loads(pickle.dumps(task))) == "abc"
    assert load_object("my_env.py:Reverse", field="f") is load_object(f"{my_env}:Reverse", field="f")


def test_a_changed_file_is_loaded_again(my_env: Path) -> None:
    assert load_object("my_env.py:FIVE", field="f") == 5
    my_env.write_text("FIVE = 55555\n")
    os.utime(my_env, (1, 1))
    assert load_object("my_env.py:FIVE", field="f") == 55555


def test_files_of_the_same_name_in_two_folders_are_separate_modules(folder: Path) -> None:
    for number in (1, 2):
        (folder / str(number)).mkdir()
        (folder / str(number) / "same.py").write_text(f"N = {number}")
    assert [load_object(f"{folder}/{number}/same.py:N", field="f") for number in (1, 2)] == [1, 2]


def test_modules_beside_the_file_can_be_imported_also_later() -> None:
    assert word_of(load_all("late")[0]) == "late"


def test_a_module_of_the_working_directory_is_found(folder: Path) -> None:
    (folder / "extra_pkg").mkdir()
    (folder / "extra_pkg" / "__init__.py").write_text("X = 1")
    assert load_object("extra_pkg:X", field="f") == 1


def test_credential_among_the_arguments_is_redacted() -> None:
    message = rejection_message("my_env.py:fails", {"x": "sk-abcdefghijklmnop1234", "api_key": "abcd1234abcd1234"})
    assert "abcd" not in message
    assert "no [redacted] [redacted]" in message
