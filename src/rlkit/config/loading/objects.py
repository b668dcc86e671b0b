"""Load objects of a configuration by import path: environments, estimators, losses, graders.

Invariant: an error in the user's code becomes one line with the field, file and line, and the exception as its cause. A
file is loaded once, as a module that pickle can import.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from rlkit._util.json_values import describe_type
from rlkit._util.paths import expand_user, shorten_path
from rlkit.algorithms.estimator import ConstantAdvantage, Estimator
from rlkit.algorithms.losses import FunctionLoss, Loss
from rlkit.config.loading.arguments import bind
from rlkit.config.loading.secrets import redact, secrets_in
from rlkit.config.schema.objective import CustomAdvantage, CustomLoss
from rlkit.env import Env, TaskSource, is_env
from rlkit.errors import EXTRAS, ConfigError, MissingError, RlkitError, UsageError, did_you_mean, missing_extra

if TYPE_CHECKING:
    from rlkit.algorithms.advantages import AnyEstimator
    from rlkit.config.schema import Config
    from rlkit.config.schema.envs import EnvConfig, EvalEnvConfig
    from rlkit.types import Json

_MODULES = ("arithmetic", "demonstrations", "discovery", "harbor", "openenv", "openreward", "rows", "verifiers")
BUILT_IN = {name: f"rlkit.envs.{name}:{name}" for name in _MODULES} | {"math": "rlkit.envs.math:maths"}
"""Built-in environments by name."""

TASKS_MAX = 1_000_000
"""Maximum number of tasks from an iterator; a longer iterator is an error, because it may be infinite."""

FILE_OBJECT = re.compile(r"(?P<file>[^\n]+\.py):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_MODULE_OBJECT = re.compile(r"(?P<module>[A-Za-z_]\w*(?:\.\w+)*):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_FORMS = "package.module:name or file.py:name"

_loaded = dict[Path, tuple[int, int]]()
"""Modification time and size of each loaded file, so that a changed file is loaded again."""


def load_object(path: str, *, field: str) -> object:
    """Return the object at an import path: `package.module:name` or `file.py:name`; the name may have dots.

    Raises:
        ConfigError: the path is malformed, the object does not exist, or loading it fails.
    """
    if named := FILE_OBJECT.fullmatch(path):
        module = load_file(expand_user(named["file"]), label=named["file"], field=field)
    elif named := _MODULE_OBJECT.fullmatch(path):
        module = _load_module(named["module"], field=field)
    else:
        hint = f": add the name of an object, such as {path}:Name" if path.endswith(".py") else ""
        raise ConfigError(f"{field}: {path!r} is not of the form {_FORMS}{hint}")
    value: object = module
    for name in named["name"].split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            names = [key for key in vars(value) if not key.startswith("_")] if hasattr(value, "__dict__") else []
            near, owner = did_you_mean(name, names), path.rpartition(":")[0]
            raise ConfigError(f"{field}: {owner} has no {name!r}.{near}") from None
    return value


def load_function(path: str, *, field: str, of: str = "") -> Callable[..., object]:
    """Return the function at an import path, as `load_object`; `of` says in the error what it is a function of."""
    function = load_object(path, field=field)
    if not callable(function):
        raise ConfigError(f"{field}: {path} is not a function{of and f' of {of}'}")
    return function


def load_envs(
    name: str,
    spec: EnvConfig | EvalEnvConfig,
    *,
    field: str,
    seed: int,
    note: Callable[[str], None] = lambda message: None,
    pin: Callable[[Json], Json] = lambda now: now,
) -> TaskSource | Sequence[Env]:
    """Return the tasks of one configured environment.

    Args:
        name: name of the environment in the run; a built-in environment of this name is used if `spec.env` is null.
        spec: environment and arguments. A parameter `seed` of the environment defaults to the run's seed.
        note: receives messages about the tasks, for an environment with a parameter `note`.
        pin: maps the current source of the tasks to that at the start of the run, for an environment with such a
            parameter.

    Raises:
        ConfigError: the environment does not exist, its arguments are invalid, or it does not return tasks.
    """
    target = spec.env or name
    where = f"{field}.env" if spec.env else field
    if target not in BUILT_IN and ":" not in target and not target.endswith(".py"):
        or_own = f", or your own as {_FORMS}" if spec.env else f"; your own: set {field}.env to {_FORMS}"
        place = "" if field == "target" else f"{where}: "  # of an argument of the command line, there is no field
        near, names = did_you_mean(target, BUILT_IN), ", ".join(sorted(BUILT_IN))
        raise ConfigError(f"{place}there is no environment {target!r}.{near} Built in: {names}{or_own}")
    factory = load_object(BUILT_IN.get(target, target), field=where)
    if spec.args and not callable(factory):
        raise ConfigError(f"{field}.args: {target} is not a function or class, so it takes no arguments")

    def note_of_field(message: str) -> None:
        note(f"{field}: {message}")

    defaults: dict[str, object] = {"seed": seed, "note": note_of_field, "pin": pin}
    with _wrap_errors(field, hidden=secrets_in(spec.args)):
        if not callable(factory):
            return factory if isinstance(factory, TaskSource) else list_envs(factory, subject=f"{target} is")
        tasks: object = factory(**bind(factory, spec.args, field=f"{field}.args", defaults=defaults, load=load_object))
        return tasks if isinstance(tasks, TaskSource) else list_envs(tasks, subject=f"{target} returned")


def list_envs(value: object, *, subject: str = "envs is") -> list[Env]:
    """Return a task, or a collection of tasks, as a list.

    Args:
        subject: beginning of the message about another value.

    Raises:
        UsageError: the value is neither, or the collection is empty.
    """
    if is_env(value):
        return [value]
    if isinstance(value, str | bytes | Mapping | type) or not isinstance(value, Iterable):
        rule = "it must be an Env, a collection of Envs or a TaskSource"
        if isinstance(value, TaskSource):
            rule = "it has no list of tasks; pass a collection of Envs"
        raise UsageError(f"{subject} {describe_type(cast('object', value))}: {rule}")
    has_end = isinstance(value, Sized)
    envs = list(islice(cast("Iterable[object]", value), None if has_end else TASKS_MAX + 1))
    if len(envs) > TASKS_MAX and not has_end:
        raise UsageError(f"{subject} an iterator of more than {TASKS_MAX} tasks: use a TaskSource")
    if not envs:
        raise UsageError(f"{subject} a collection without tasks: there must be at least one Env")
    for index, env in enumerate(envs):
        if not is_env(env):
            raise UsageError(f"{subject} a collection whose item {index} is {describe_type(env)}: each must be an Env")
    return cast("list[Env]", envs)


def load_estimators(config: Config, overrides: Mapping[str, AnyEstimator]) -> dict[str, Estimator]:
    """Return the estimator of each environment: an entry of `overrides`, its own `advantage`, or the run's.

    An environment whose rewards are not trained on has advantages of 0; conversations have advantages of 1.

    Raises:
        ConfigError: the import path of an estimator is not a function, or the schedule does not support the estimator.
    """
    from rlkit.algorithms.advantages import as_estimator

    estimators = dict[str, Estimator]()
    for name, env in config.envs.items():
        chosen = (env.advantage or config.advantage) if config.trains_on_rewards(name) else ConstantAdvantage(value=0)
        imitated = ConstantAdvantage(value=1)
        estimator: object = overrides.get(name, chosen) if name in config.reinforced_envs else imitated
        if isinstance(estimator, CustomAdvantage):
            loaded = load_object(estimator.function, field="advantage")
            if not callable(loaded) and not isinstance(loaded, Estimator):
                raise ConfigError(f"advantage: {estimator.function} is not a function of a group")
            is_class = isinstance(loaded, type) and issubclass(loaded, Estimator)
            estimator = cast("type[Estimator]", loaded)() if is_class else cast("object", loaded)
        estimators[name] = as_estimator(cast("AnyEstimator", estimator))
        if (problem := estimators[name].stream_problem) is not None and config.schedule.is_streaming:
            raise ConfigError(f"envs.{name}: {problem}")
    return estimators


def load_loss(loss: Loss) -> Loss:
    """Return the loss of a run; load it if it is a user's function. ConfigError if loading fails."""
    if not isinstance(loss, CustomLoss):
        return loss
    return FunctionLoss(function=load_function(loss.function, field="loss.function"))


def load_file(path: Path, *, label: str | None = None, field: str = "file") -> ModuleType:
    """Load a Python file as a module that pickle can import; ConfigError, with `label` for the path, if this fails."""
    path, label = path.resolve(), label or str(path)
    try:
        about = path.stat()
    except OSError:
        raise ConfigError(f"{field}: {missing_file(label, [path])}") from None
    # The hash makes the module name unique for the file.
    name = f"rlkit_user_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    stamp = (about.st_mtime_ns, about.st_size)
    if name in sys.modules and _loaded.get(path) == stamp:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{field}: {label} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with _importable(path.parent), _wrap_errors(field):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise
    _loaded[path] = stamp
    return module


def loaded_files() -> Sequence[Path]:
    """Return the Python files that were loaded in this process, in order."""
    return list(_loaded)


def missing_file(name: str, places: Sequence[Path], *, hidden: bool = False) -> str:
    """Return a message that a file is in none of `places`, with a similar name; only that if the path is `hidden`."""
    message = f"there is no file {name!r}"
    if hidden:
        return message
    message += f" in {' or '.join(dict.fromkeys(str(place.parent.resolve()) for place in places))}"
    files = [file.name for place in places for file in place.parent.glob(f"*{place.suffix}")]
    near = did_you_mean(name, [str(Path(name).parent / file) for file in files])
    return f"{message}.{near}" if near else message


def _load_module(name: str, *, field: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    importlib.invalidate_caches()  # the module may have been written just now
    with _importable(Path.cwd()), _wrap_errors(field):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise
            fix = "install its package, or write file.py:name for a file"
            raise ConfigError(f"{field}: there is no module {name!r}: {fix}") from None


@contextmanager
def _importable(folder: Path) -> Generator[None]:
    """Put a folder first on `sys.path` inside, and last afterwards, for late imports of the user's code."""
    entry = str(folder)
    is_on_path = entry in sys.path
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
        if not is_on_path:
            sys.path.append(entry)


@contextmanager
def _wrap_errors(field: str, *, hidden: Iterable[str] = ()) -> Generator[None]:
    """Convert an exception of the user's code to a ConfigError of one line, without the `hidden` texts.

    It has the form `field: file:line: Exception: message`, with the innermost line of the user's code.
    """
    try:
        yield
    except (UsageError, MissingError) as error:
        if str(error).startswith(field):
            raise
        kind = MissingError if isinstance(error, MissingError) else ConfigError
        raise kind(f"{field}: {error}") from error
    except RlkitError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            raise missing_extra(error.name) from error
        from rlkit._util.frames import error_place  # needs asyncio, which reading a configuration does not

        place, raised_at = "", error_place(error)
        if isinstance(error, SyntaxError) and error.filename:
            place = f"{shorten_path(Path(error.filename))}:{error.lineno}: "
        elif raised_at is not None and raised_at.file != __file__:
            place = f"{shorten_path(Path(raised_at.file))}:{raised_at.line}: "
        message = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        problem = f"{place}{type(error).__name__}: {redact(message, hidden=hidden)}"
        raise ConfigError(f"{field}: {problem} (--debug shows the whole traceback)") from error
