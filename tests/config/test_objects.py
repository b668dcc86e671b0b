from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from rlkit.config import load_envs, load_object
from rlkit.config.schema import EnvConfig, EvalEnvConfig
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


def envs(name: str, **args: object) -> Sequence[Env]:
    spec = EnvConfig.model_validate({"env": f"my_env.py:{name}", "args": args})
    return cast("Sequence[Env]", load_envs("x", spec, field="envs.x", seed=7))


def refused(env: str | None, args: Mapping[str, object] | None = None, *, name: str = "x") -> str:
    with pytest.raises(ConfigError) as caught:
        load_envs(name, EnvConfig.model_validate({"env": env, "args": args or {}}), field=f"envs.{name}", seed=7)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def word(task: Env) -> str:
    return cast("str", getattr(task, "word"))  # noqa: B009  the class is known only to the file


def test_a_class_a_function_a_list_and_an_object_all_give_tasks() -> None:
    assert [word(task) for task in envs("Reverse", word="abc")] == ["abc"]
    assert [word(task) for task in envs("Spell", word="abc")] == ["abc"]
    assert [word(task) for task in envs("many", n=3)] == ["0", "1", "2"]
    assert [word(task) for task in envs("keywords", a=1)] == ["{'a': 1}"]
    assert [word(task) for task in envs("TASKS")] == ["a", "b"]
    assert [word(task) for task in envs("TASK")] == ["x"]
    assert [word(task) for task in envs("Nested.Inner", word="in")] == ["in"]
    assert len(envs("Bare")) == 1


def test_a_task_source_is_kept_as_it_is_and_gets_the_seed() -> None:
    assert getattr(envs("Source"), "seed") == 7  # noqa: B009
    assert getattr(envs("Source", seed=3), "seed") == 3  # noqa: B009


def test_a_function_can_tell_what_a_person_should_know() -> None:
    told = list[str]()
    for name in ("tells", "annotates"):
        spec = EnvConfig.model_validate({"env": f"my_env.py:{name}"})
        (task,) = load_envs("x", spec, field="envs.x", seed=7, note=told.append)
    assert told == ["envs.x: 1 tasks"]
    assert word(task) == "mine"  # an argument of the same name that is no function is the user's own


def test_arguments_take_the_types_of_their_annotations(folder: Path) -> None:
    envs("many", n=1, mode="test", path="a/b", grader="my_env.py:grade", unknown_type=[1])
    many, grade = load_object("my_env.py:many", field="f"), load_object("my_env.py:grade", field="f")
    assert getattr(many, "last") == (1, "test", Path("a/b"), grade, 7)  # noqa: B009
    assert len(envs("many", n="2", seed=5)) == 2  # text is what an environment variable gives


@pytest.mark.parametrize(
    ("name", "args", "told"),
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
def test_an_argument_that_does_not_fit_is_named(name: str, args: Mapping[str, object], told: str) -> None:
    assert refused(f"my_env.py:{name}", args).startswith(told)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("empty", "returned no tasks"),
        ("none", "returned None: it must return an Env, a collection of Envs or a TaskSource"),
        ("text", "returned a value of type str"),
        ("mapping", "returned a value of type dict"),
        ("strings", "item 0 returned by my_env.py:strings is a value of type str: each must be an Env"),
        ("classes", "item 0 returned by my_env.py:classes is the class Reverse"),
        ("a_class", "returned the class Reverse itself"),
        ("coroutine", "is async"),
        ("FIVE", "returned a value of type int"),
        ("endless", "more than 1000000 tasks: return a TaskSource"),
        ("fails", "envs.x: my_env.py:86: ValueError: no "),
        ("unfinished", "envs.x: my_env.py:82: KeyError: 'inside'"),
        ("refuses", "envs.x: split: there is no such split"),
        ("Revers", "envs.x.env: my_env.py has no 'Revers'. Did you mean 'Reverse'?"),
    ],
)
def test_what_gives_no_tasks_is_told_with_its_place(name: str, told: str) -> None:
    assert told in refused(f"my_env.py:{name}")


def test_what_is_missing_on_the_machine_stays_a_missing_error() -> None:
    with pytest.raises(MissingError, match="install it"):
        envs("lacks")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("broken.py:x", "envs.x.env: broken.py:2: NameError: name 'nope' is not defined"),
        ("syntax.py:x", "envs.x.env: syntax.py:1: SyntaxError: '(' was never closed"),
        ("leaves.py:x", "envs.x.env: leaves.py:1: SystemExit: 3"),
        ("needs.py:x", "envs.x.env: needs.py:1: ModuleNotFoundError: No module named 'not_installed'"),
        ("my_evn.py:x", "envs.x.env: there is no file 'my_evn.py'. Did you mean 'my_env.py'?"),
        ("my_env.py", "'my_env.py' is not of the form package.module:name or file.py:name: add the name of an object"),
        ("not_there.envs:x", "there is no module 'not_there.envs': install its package"),
        ("os.not_there:x", "there is no module 'os.not_there'"),
        ("os:not_there", "os has no 'not_there'"),
        ("a b:c", "'a b:c' is not of the form"),
        (":x", "':x' is not of the form"),
        ("arithmatic", "there is no environment 'arithmatic'. Did you mean 'arithmetic'? Built in: arithmetic"),
    ],
)
def test_what_cannot_be_loaded_is_told_with_the_users_own_line(folder: Path, path: str, told: str) -> None:
    (folder / "broken.py").write_text("x = 1\ny = nope\n")
    (folder / "syntax.py").write_text("x = (\n")
    (folder / "leaves.py").write_text("import sys; sys.exit(3)\n")
    (folder / "needs.py").write_text("import not_installed\n")
    assert told in refused(path)
    assert not [name for name in sys.modules if name.startswith(("rlkit_user_broken", "rlkit_user_leaves"))]


def test_a_name_that_is_not_built_in_is_answered_with_those_that_are() -> None:
    told = refused(None, name="arithmetc")
    assert told.startswith("envs.arithmetc: there is no environment 'arithmetc'. Did you mean 'arithmetic'?")
    assert "set envs.arithmetc.env to package.module:name or file.py:name" in told


def test_the_built_in_environment_is_checked_like_any_other() -> None:
    tasks = load_envs("arithmetic", EvalEnvConfig(args={"count": 5}), field="eval.envs.arithmetic", seed=1)
    assert len(cast("Sequence[Env]", tasks)) == 5
    assert (
        refused(None, {"max_operand": 0}, name="arithmetic") == "envs.arithmetic.args.max_operand: expected at least 1"
    )


def test_a_task_from_a_file_can_be_pickled_and_the_file_is_loaded_once(my_env: Path) -> None:
    task = envs("Reverse", word="abc")[0]
    assert word(pickle.loads(pickle.dumps(task))) == "abc"
    assert load_object("my_env.py:Reverse", field="f") is load_object(f"{my_env}:Reverse", field="f")


def test_a_changed_file_is_loaded_again(my_env: Path) -> None:
    assert load_object("my_env.py:FIVE", field="f") == 5
    my_env.write_text("FIVE = 55555\n")
    os.utime(my_env, (1, 1))
    assert load_object("my_env.py:FIVE", field="f") == 55555


def test_files_of_the_same_name_in_two_folders_do_not_meet(folder: Path) -> None:
    for number in (1, 2):
        (folder / str(number)).mkdir()
        (folder / str(number) / "same.py").write_text(f"N = {number}")
    assert [load_object("same.py:N", field="f", base=folder / str(number)) for number in (1, 2)] == [1, 2]


def test_modules_beside_the_file_can_be_imported_also_later() -> None:
    assert word(envs("late")[0]) == "late"


def test_a_module_of_the_working_directory_is_found(folder: Path) -> None:
    (folder / "extra_pkg").mkdir()
    (folder / "extra_pkg" / "__init__.py").write_text("X = 1")
    assert load_object("extra_pkg:X", field="f") == 1


def test_a_credential_among_the_arguments_is_not_repeated() -> None:
    told = refused("my_env.py:fails", {"x": "sk-abcdefghijklmnop1234", "api_key": "abcd1234abcd1234"})
    assert "abcd" not in told
    assert "no [redacted] [redacted]" in told
