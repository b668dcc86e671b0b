"""Diagnosis of this machine or of a run: findings with fixes.

Invariant: nothing is changed, and the value of a key is never printed. Heavy packages are imported only for the checks
of the service and of the engine.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlkit._util import paths
from rlkit._util.threads import call_within
from rlkit.errors import DISTRIBUTION, RlkitError, UsageError, show_install
from rlkit.tools.time_limits import ProgramResult, run_program

if TYPE_CHECKING:
    from rlkit.metrics.diagnostics import Finding as RunFinding
    from rlkit.tinker_client.connect import ServiceChoice
    from rlkit.tools.run_ending import RunEnding

PACKAGES = (DISTRIBUTION, "tinker", "tinker-cookbook", "torch", "transformers", "harbor", "openreward")
KEYS = ("TINKER_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "OPENREWARD_API_KEY")

SERVICE_TIMEOUT_S = 5.0
FOLDER_TIMEOUT_S = 20.0
DOCKER_TIMEOUT_S = 20.0
PROGRAMS_TIMEOUT_S = 120.0
ENGINE_TIMEOUT_S = 900.0  # limit of the engine check; compiling its kernels takes minutes on a busy machine
ENGINE_PROBE = (sys.executable, "-m", "rlkit.tools.engine_probe")
LITTLE_DISK_BYTES = 5 * 10**9
NO_DISK_BYTES = 500 * 10**6
GB = 10**9


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: `fail` prevents every run, `warn` prevents some runs."""

    subject: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def examine_machine(
    *, engine: bool = True, environ: Mapping[str, str] = os.environ, note: Callable[[str], None] = lambda message: None
) -> Iterator[Finding]:
    """Check everything that a run with default settings needs, and yield a finding per check.

    Args:
        engine: also start the embedded engine with a tiny random model and sample once; takes some seconds.
    """
    from rlkit.config.schema import ServiceConfig
    from rlkit.tinker_client.connect import choose_service

    choice = choose_service(ServiceConfig(), environ=environ)
    needed = choice.kind == "engine"
    yield check_python()
    yield from check_packages()
    yield check_keys(environ)
    yield check_service(choice)
    yield _check_within_limit("default model", lambda: check_default_model(needed=needed))
    yield _check_within_limit("runs folder", check_runs_folder)
    yield check_docker()
    yield from check_extras()
    yield check_model_programs(note=note)
    yield check_sandbox()
    if engine:
        yield check_engine(needed=needed, note=note)


def examine_run(run: str | Path) -> tuple[Path, int, RunEnding | None, list[RunFinding]]:
    """Return a run's folder, its last step with metrics, its outcome, and its findings.

    Raises:
        UsageError: the run does not exist, or one of its files is damaged.
    """
    from rlkit.config.loading.run_config import find_run
    from rlkit.metrics.diagnostics import ENOUGH, find_problems
    from rlkit.store.history import read_metrics
    from rlkit.tools.run_ending import read_run_ending

    directory = find_run(run)
    metrics = read_metrics(directory / "metrics.jsonl")
    # A short run is examined, too: with the number of steps of its shortest part.
    steps = Counter(name for _, values in metrics for name in values if name.endswith("/groups/mixed"))
    run_findings = find_problems(metrics, enough=min([ENOUGH, *steps.values()])) + _read_recorded_findings(directory)
    return directory, metrics[-1][0] if metrics else 0, read_run_ending(directory), run_findings


def _read_recorded_findings(directory: Path) -> list[RunFinding]:
    from rlkit._util.files import json_lines
    from rlkit.metrics.diagnostics import Finding as RunFinding

    path = directory / "run.json"
    try:
        return [RunFinding(**finding) for finding in json_lines.read_object(path).get("findings") or ()]
    except TypeError as error:
        raise UsageError(f"{path} is damaged: findings: {error}") from error


def _check_within_limit(subject: str, check: Callable[[], Finding]) -> Finding:
    """Run a check of folders with a time limit, because a disk may not respond."""
    result = call_within(check, timeout_s=FOLDER_TIMEOUT_S)
    if isinstance(result, Finding):
        return result
    return Finding(subject, "fail", result, "check that the disks of RLKIT_RUNS_DIR and of the caches respond")


def check_python() -> Finding:
    """Check the version of Python."""
    version = platform.python_version()
    required = metadata.metadata(DISTRIBUTION)["Requires-Python"] if _installed_version(DISTRIBUTION) else ""
    if SpecifierSet(required).contains(version, prereleases=True):
        return Finding("python", "ok", version)
    return Finding("python", "fail", f"{version}, but rlkit needs {required}", "run `uv python install 3.12`")


def check_packages() -> Iterator[Finding]:
    """Check the versions of the main dependencies against the requirements of rlkit."""
    if _installed_version("rlkit") is not None:  # the other library writes into the same folder
        problem = "another library of this name is installed, and shares the folder rlkit with this one"
        fix = f"run `pip uninstall rlkit {DISTRIBUTION}`, then install {DISTRIBUTION}"
        yield Finding("rlkit", "fail", problem, fix)
    requirements = {requirement.name: requirement for requirement in _read_requirements() if requirement.marker is None}
    for name in PACKAGES:
        version, requirement = _installed_version(name), requirements.get(name)
        if version is None:
            problem = "importable but not installed" if name == DISTRIBUTION else "not installed"
            yield Finding(name, "fail", problem, f"run `uv sync`, or `pip install {DISTRIBUTION}`")
        elif requirement is None or requirement.specifier.contains(version, prereleases=True):
            yield Finding(name, "ok", version)
        else:
            problem = f"{version}, but rlkit needs {requirement.specifier}"
            yield Finding(name, "fail", problem, f"install '{requirement}'")


def check_keys(environ: Mapping[str, str]) -> Finding:
    """Check the presence and the form of API keys."""
    present = [name for name in KEYS if environ.get(name)]
    absent = [name for name in KEYS if not environ.get(name)]
    names_by_state = {"set": present, "not set": absent}
    detail = "; ".join(f"{state}: {', '.join(names)}" for state, names in names_by_state.items() if names)
    for name in present:
        value = environ[name]
        if value != value.strip() or value[0] in "'\"":
            return Finding("keys", "warn", detail, f"{name} is surrounded by quotes or spaces: set it without them")
    tinker = environ.get("TINKER_API_KEY", "tml-")
    if tinker and not tinker.startswith(("tml-", "eyJ")):
        return Finding("keys", "warn", detail, "TINKER_API_KEY does not begin with tml-: copy the key again")
    return Finding("keys", "ok", detail)


def check_service(choice: ServiceChoice, *, timeout_s: float = SERVICE_TIMEOUT_S) -> Finding:
    """Check that the Tinker service answers."""
    if choice.kind == "engine":
        return Finding("service", "ok", f"the embedded engine ({choice.reason})")
    import httpx  # before the time limit starts: the import takes seconds on a busy machine
    from tinker.lib.base_url import DEFAULT_BASE_URL

    url = choice.base_url or DEFAULT_BASE_URL

    def request() -> str | None:
        response = httpx.get(f"{url.rstrip('/')}/api/v1/healthz", timeout=timeout_s, follow_redirects=True)
        # Some services require a key even for this request.
        is_up = response.is_success or response.status_code in (401, 403)
        return None if is_up else f"the answer was HTTP {response.status_code}"

    problem = call_within(request, timeout_s=timeout_s + 1)
    if problem is None:
        return Finding("service", "ok", f"{url} answers ({choice.reason})")
    fix = "check the address and the network; to use the embedded engine, unset the variable that selects the service"
    return Finding("service", "fail", f"{url} ({choice.reason}): {problem}", fix)


def check_default_model(*, needed: bool) -> Finding:
    """Check that the files of the default model are on this machine."""
    from rlkit._util.model_names import DEFAULT_MODEL
    from rlkit.engine.model.model_files import find_model

    subject = "default model"
    if (directory := find_model(DEFAULT_MODEL)) is not None:
        return Finding(subject, "ok", f"{DEFAULT_MODEL} is in {directory}")
    detail = f"{DEFAULT_MODEL} will be downloaded at its first use, from the Hugging Face hub or the package index"
    return Finding(subject, "ok" if not needed else "warn", detail, "run once with a network connection" * needed)


def check_engine(
    *,
    needed: bool,
    timeout_s: float = ENGINE_TIMEOUT_S,
    command: Sequence[str] = ENGINE_PROBE,
    note: Callable[[str], None] = lambda message: None,
) -> Finding:
    """Start the engine in a separate process, and sample from it with the Tinker SDK.

    Args:
        needed: a run with default settings uses the engine.
        command: program that tests the engine; its last line of output is its stage or its error.
    """
    started = time.monotonic()
    result = run_program(
        command, timeout_s=timeout_s, progress=lambda line, seconds: note(f"engine: {line} ({seconds:.0f} s)")
    )
    if result.code == 0:
        return Finding("engine", "ok", f"started and sampled in {time.monotonic() - started:.1f} s")
    problem = result.last_line or f"exit code {result.code} without output"
    if result.code is None:
        problem = f"not ready within {timeout_s:g} s; last: {result.last_line or 'nothing'}"
    fix = "run `rlkit serve --debug` to see the cause; the engine is not needed with a Tinker service"
    return Finding("engine", "fail" if needed else "warn", problem, fix)


def check_runs_folder() -> Finding:
    """Check that the folder of runs is writable and has free space."""
    folder = paths.runs_dir()
    ancestor = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    other_folder = "set RLKIT_RUNS_DIR to a writable folder"
    if not ancestor.is_dir():
        return Finding("runs folder", "fail", f"{folder}: {ancestor} is not a folder", other_folder)
    try:
        tempfile.TemporaryFile(dir=ancestor).close()
    except OSError as error:
        return Finding("runs folder", "fail", f"{folder} cannot be written: {error.strerror}", other_folder)
    free = shutil.disk_usage(ancestor).free
    detail = f"{folder}, {free / GB:.1f} GB free"
    if free < LITTLE_DISK_BYTES:
        fix = "free some space, or set RLKIT_RUNS_DIR to a larger disk"
        return Finding("runs folder", "fail" if free < NO_DISK_BYTES else "warn", detail, fix)
    return Finding("runs folder", "ok", detail)


def check_docker(*, timeout_s: float = DOCKER_TIMEOUT_S) -> Finding:
    """Check that the Docker daemon answers and that `docker compose` is available, which Harbor needs."""
    only = "only Harbor tasks in local containers need it"
    if shutil.which("docker") is None:
        return Finding("docker", "warn", "not found", f"{only}: install Docker")

    def describe_failure(command: str, result: ProgramResult) -> str:
        if result.code is None:
            return f"`{command}` did not answer within {timeout_s:g} s"
        return f"`{command}`: {result.last_line or f'exit code {result.code}'}"

    info = run_program(["docker", "info", "--format", "{{.ServerVersion}}"], timeout_s=timeout_s)
    if info.code != 0:
        fix = f"{only}: start the Docker daemon, and add this user to the group docker"
        return Finding("docker", "warn", describe_failure("docker info", info), fix)
    compose = run_program(["docker", "compose", "version", "--short"], timeout_s=timeout_s)
    if compose.code != 0:
        fix = f"{only}: install docker-compose-plugin"
        return Finding("docker", "warn", describe_failure("docker compose version", compose), fix)
    return Finding("docker", "ok", f"engine {info.last_line}, compose {compose.last_line}")


def check_extras() -> Iterator[Finding]:
    """Check the packages of each optional extra, and of the extras of other packages that it names."""
    extras = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") if _read_requirements() else None
    for extra in extras or []:
        names = list(_list_packages(DISTRIBUTION, extra))
        absent = [name for name in dict.fromkeys(names) if _installed_version(name) is None]
        if not absent:
            yield Finding(f"extra {extra}", "ok", "installed")
        elif extra != "all":
            fix = f"to use it, run {show_install(extra)}"
            yield Finding(f"extra {extra}", "ok", f"optional, not installed: {', '.join(absent)}", fix)


def check_model_programs(*, note: Callable[[str], None] = lambda message: None) -> Finding:
    """Check the isolation of model-written programs of `discovery`, by testing each layer."""
    from rlkit.sandbox.runners.fork_server import ForkServer, default_level
    from rlkit.sandbox.runners.programs import LEVELS, Isolation

    subject = "model programs"

    def measure() -> Isolation:
        with closing(ForkServer(workers=1, min_isolation="none", preload=())) as server:
            return server.start()

    def report(seconds: float) -> None:
        note(f"model programs: still testing ({seconds:.0f} s)")

    isolation = call_within(measure, timeout_s=PROGRAMS_TIMEOUT_S, progress=report)
    if isinstance(isolation, str):
        fix = "only the environment `discovery` needs them: use another machine"
        return Finding(subject, "warn", f"cannot run: {isolation}", fix)
    detail = f"isolation {isolation.level!r}: {isolation}"
    if LEVELS.index(isolation.level) >= LEVELS.index("os"):
        return Finding(subject, "ok", detail)
    needed = f"`discovery` requires {default_level()!r} unless min_isolation is set"
    fix = f"{needed}; use Linux 5.13 or later with Landlock and seccomp to deny access to your files and the network"
    return Finding(subject, "warn", detail, fix)


def check_sandbox() -> Finding:
    """Check that a local sandbox starts, and that its verifier can be sealed from the agent's processes."""
    import asyncio

    from rlkit.sandbox import Sandbox, Spec, image

    subject = "local sandbox"

    async def open_view() -> str:
        sandbox = await Sandbox.start(Spec(trees=image.trees(image.base(image.HOST))))
        try:
            if not sandbox.seal_problem:
                await (await sandbox.open_view(private=("/tests",))).run("true")
            return sandbox.seal_problem
        finally:
            await sandbox.stop()

    def start() -> Finding:
        try:
            problem = asyncio.run(open_view())
        except (RlkitError, OSError) as error:
            fix = "only Harbor tasks without a container engine need it: use another environment, such as docker"
            return Finding(subject, "warn", str(error), fix)
        if problem:
            detail = f"starts, but verification is not sealed ({problem}): the agent's processes are killed before it"
            return Finding(subject, "warn", detail, "use Linux 5.19 or later with Landlock")
        return Finding(subject, "ok", "starts, and verification is sealed from the agent's remaining processes")

    result = call_within(start, timeout_s=PROGRAMS_TIMEOUT_S)
    fix = "run with --debug to see the cause"
    return result if isinstance(result, Finding) else Finding(subject, "warn", result, fix)


def _read_requirements(package: str = DISTRIBUTION) -> list[Requirement]:
    """Return the requirements of a package; none if it is not installed."""
    texts = metadata.requires(package) if _installed_version(package) else None
    return [Requirement(text) for text in texts or ()]


def _list_packages(package: str, extra: str) -> Iterator[str]:
    """Yield the packages that an extra adds, with those of extras that it names, such as `harbor[modal]`."""
    for requirement in _read_requirements(package):
        marker = requirement.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            yield requirement.name
            for nested in requirement.extras:
                yield from _list_packages(requirement.name, nested)


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
