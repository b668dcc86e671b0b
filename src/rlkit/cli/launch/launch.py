"""`rlkit launch`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlkit.cli.common.output import Data, Output
from rlkit.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from rlkit.launch.job import Job

_RUNS = "RLKIT_RUNS_DIR"
_KEYS = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says of a job for Beaker; see `rlkit.launch.job.Job`."""

    workspace: str | None
    budget: str | None
    clusters: Sequence[str]
    hostnames: Sequence[str]
    image: str
    name: str
    experiment: str | None
    description: str | None
    gpus: int
    cpus: float | None
    memory: str | None
    priority: str
    preemptible: bool | None
    min_runtime: str | None
    retries: int
    replicas: int
    host_networking: bool
    timeout: str | None
    env: Sequence[str]
    secrets: Sequence[str]
    mounts: Sequence[str]
    runs_dir: str | None
    code: str
    install: str | None
    allow_dirty: bool


def beaker(command: Sequence[str], options: Options, output: Output, *, follow: bool, dry_run: bool) -> int:
    """Submit a job, or print what would be submitted. Returns the exit code."""
    from rlkit.launch.job import spec

    job = _job(command, options)
    _refuse_secrets(job)
    for note in notes(job):
        output.note(note)
    described = spec(job)
    if dry_run:
        _show(described, options, output)
        return 0
    from rlkit.launch.beaker import submit

    url = submit(described, workspace=options.workspace, name=options.experiment, follow=follow, say=output.note)
    if output.json:
        output.data({"url": url})
    else:
        output.line(url)
    return 0


def notes(job: Job) -> list[str]:
    """What a person should know of a job before it runs."""
    from rlkit.launch.job import kept
    from rlkit.launch.restart import trains

    env = job.env or {}
    found = list[str]()
    if trains(job.command) and job.preemptible is not False and not kept(job, env[_RUNS]):
        found.append(
            f"runs are written to {env[_RUNS]}, which no mount keeps: a job that is preempted begins anew; give "
            "--mount and --runs-dir below it"
        )
    if not any(name in env or name in (job.secrets or {}) for name in _KEYS):
        found.append(
            "the job has no TINKER_API_KEY, and would train with the embedded engine: give --secret TINKER_API_KEY"
        )
    if job.replicas > 1 and trains(job.command):
        found.append("each replica trains a run of its own, and all of one name: one replica is enough")
    return found


def _refuse_secrets(job: Job) -> None:
    """Check what stands in a job for anyone who may see it.

    Raises:
        UsageError: something has the shape of a credential, or is one of this environment.
    """
    from rlkit.trackers.feed import clean

    env = {f"--env {name}": value for name, value in (job.env or {}).items()}
    told = {"--description": job.description, "--install": job.install, **env}
    for place, text in [*(("the command", word) for word in job.command), *told.items()]:
        if text is not None and clean(text) != text:
            raise UsageError(
                f"{place} holds a secret, and anyone who sees the job would see it: keep it in Beaker (`beaker secret "
                "write NAME …`) and give --secret NAME"
            )


def _job(command: Sequence[str], options: Options) -> Job:
    from rlkit.launch.code import code_of
    from rlkit.launch.job import PRIORITIES, RESULTS, Job, Mount
    from rlkit.launch.restart import restartable

    if options.priority not in PRIORITIES:
        hint = did_you_mean(options.priority, PRIORITIES)
        raise UsageError(f"--priority: {options.priority!r} is none of {', '.join(PRIORITIES)}.{hint}")
    env = _variables(options.env)
    if options.runs_dir is not None:
        env[_RUNS] = options.runs_dir
    return Job(
        command=restartable(command, name=f"{options.name}-{secrets.token_hex(4)}"),
        name=options.name,
        image=options.image,
        budget=options.budget,
        description=options.description,
        clusters=options.clusters,
        hostnames=options.hostnames,
        gpus=options.gpus,
        cpus=options.cpus,
        memory=options.memory,
        priority=options.priority,
        preemptible=None
        if options.min_runtime is not None and options.preemptible is None
        else options.preemptible is not False,
        min_runtime=options.min_runtime,
        retries=options.retries,
        replicas=options.replicas,
        host_networking=options.host_networking,
        timeout=options.timeout,
        env={_RUNS: RESULTS, **env},
        secrets=dict(_pair(one) for one in options.secrets),
        mounts=[Mount.read(one) for one in options.mounts],
        code=code_of(Path.cwd(), allow_dirty=options.allow_dirty) if _kind(options.code) == "git" else None,
        install=options.install,
    )


def _kind(code: str) -> Literal["git", "image"]:
    if code not in ("git", "image"):
        raise UsageError(f"--code: {code!r} is neither git nor image.{did_you_mean(code, ('git', 'image'))}")
    return code


def _variables(given: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE`, or `NAME` for the value that it has here."""
    found = dict[str, str]()
    for one in given:
        name, equals, value = one.partition("=")
        if not equals and name not in os.environ:
            raise UsageError(f"--env: {name} is not set here: write --env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def _pair(given: str) -> tuple[str, str]:
    """`NAME=SECRET`, or `NAME` for a secret of the same name."""
    name, _, secret = given.partition("=")
    return name, secret or name


def _show(described: Mapping[str, Data], options: Options, output: Output) -> None:
    if output.json:
        output.data({"workspace": options.workspace, "name": options.experiment, "spec": described})
        return
    head = f"# workspace: {options.workspace or 'the default of your account'}\n"
    head += f"# experiment: {options.experiment or 'a name that Beaker makes up'}\n"
    output.line(head + _yaml(described).rstrip())


def _yaml(described: Mapping[str, Data]) -> str:
    """Return a specification as YAML, in which the lines of a script are lines."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    return yaml.dump(dict(described), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
