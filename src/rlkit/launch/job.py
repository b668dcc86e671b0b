"""Specification of a Beaker job.

Invariant: the words of the command are passed unchanged, as arguments of a shell script. A specification contains names
of secrets stored in Beaker, never their values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Literal, get_args

from rlkit.config.loading.secrets import clean, is_secret
from rlkit.errors import UsageError, did_you_mean
from rlkit.launch.git_commit import GitCommit
from rlkit.types import Json

type Priority = Literal["low", "normal", "high", "urgent", "immediate"]
type MountKind = Literal["weka", "dataset", "host", "result", "volume", "secret"]

PRIORITIES: tuple[Priority, ...] = get_args(Priority.__value__)
_MOUNT_KINDS: tuple[MountKind, ...] = get_args(MountKind.__value__)
_SOURCE_FIELDS: Mapping[str, str] = {"dataset": "beaker", "host": "hostPath"}
"""Fields of a specification by kinds of mounts, if their names differ."""

SCRIPT = """\
if [ -n "${RLKIT_REPOSITORY:-}" ]; then
  if [ -n "${GITHUB_TOKEN:-}" ]; then
    git config --global credential.helper '!f() { echo username=token; echo "password=$GITHUB_TOKEN"; }; f'
  fi
  code=$(mktemp -d)
  git clone --quiet --no-checkout "$RLKIT_REPOSITORY" "$code"
  cd "$code"
  git checkout --quiet "$RLKIT_COMMIT"
fi
if [ -n "${RLKIT_INSTALL:-}" ]; then eval "$RLKIT_INSTALL"; fi
exec "$@"
"""
"""Script of the job: fetches the code, then replaces itself by the command, which receives the preemption signal."""

RESULTS = "/results"
"""Folder that Beaker stores."""

RUNS_VARIABLE = "RLKIT_RUNS_DIR"
_SERVICE_VARIABLES = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL")


@dataclass(frozen=True, slots=True)
class Mount:
    """Source to mount in the container: a name, or a path on the host."""

    kind: MountKind
    source: str
    target: str

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Parse `KIND:SOURCE:/PATH`, such as `weka:bucket:/path`; UsageError if the form is invalid."""
        kind, _, rest = text.partition(":")
        source, _, target = rest.rpartition(":")
        if kind not in _MOUNT_KINDS or not source or not target.startswith("/"):
            raise UsageError(
                f"--mount: {text!r} is not KIND:SOURCE:/PATH with a kind of {', '.join(_MOUNT_KINDS)}."
                f"{did_you_mean(kind, _MOUNT_KINDS)}"
            )
        return cls(kind, source, target)


@dataclass(frozen=True, slots=True)
class Job:
    """Command, and requirements on the machines that run it."""

    command: Sequence[str]
    name: str = "rlkit"
    image: str = "docker:rlkit"  # `docker:NAME`, or the name of an image in Beaker
    budget: str | None = None  # budget to charge; None for the workspace's own
    description: str | None = None
    clusters: Sequence[str] = ()  # permitted clusters; empty for any
    hostnames: Sequence[str] = ()  # permitted nodes; empty for any
    gpus: int = 0  # GPUs of each replica
    cpus: float | None = None  # CPUs of each replica; None for no limit
    memory: str | None = None  # memory of each replica, such as `32GiB`; None for no limit
    priority: Priority = "normal"
    preemptible: bool | None = True  # allow Beaker to stop and restart the job; None for Beaker's default
    min_runtime: str | None = None  # time without preemption, such as `2h`; cannot be combined with `preemptible`
    retries: int = 0
    replicas: int = 1
    host_networking: bool = False
    timeout: str | None = None  # time after which Beaker stops the job, such as `24h`
    env: Mapping[str, str] | None = None
    secrets: Mapping[str, str] | None = None  # names of secrets in Beaker, by environment variable
    mounts: Sequence[Mount] = ()
    code: GitCommit | None = None  # commit to fetch before the command runs; None for the content of the image
    install: str | None = None  # shell command to run first, in the code's folder

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError(
                "there is no command: write it after --, as in `rlkit launch beaker -- rlkit train config.yaml`"
            )
        if self.preemptible is not None and self.min_runtime is not None:
            raise UsageError("--min-runtime and --preemptible exclude each other: leave out one of them")
        for name, value in (self.env or {}).items():
            if not (name.isascii() and name.isidentifier()):
                raise UsageError(f"--env: {name!r} is not a valid variable name")
            if is_secret(name, value):
                raise UsageError(
                    f"--env {name}: its value looks like a secret, and would be visible to everyone who can see the "
                    f"job: store it in Beaker (`beaker secret write {name} …`) and use --secret {name}"
                )
        public = {"--description": self.description, "--install": self.install}
        public |= {f"--env {name}": value for name, value in (self.env or {}).items()}
        for place, text in [*(("the command", word) for word in self.command), *public.items()]:
            if text is not None and clean(text) != text:
                raise UsageError(
                    f"{place} contains a secret, which would be visible to everyone who can see the job: store it in "
                    "Beaker (`beaker secret write NAME …`) and use --secret NAME"
                )


def make_spec(job: Job) -> dict[str, Json]:
    """Return the specification of an experiment, version 2, as JSON."""
    context: dict[str, Json] = {"priority": job.priority}
    if job.min_runtime is not None:
        context |= {"minRuntime": job.min_runtime, "autoResume": True}
    elif job.preemptible is not None:
        context["preemptible"] = job.preemptible
    kind, _, image = job.image.partition(":")
    constraints = _drop_none({"cluster": list(job.clusters) or None, "hostname": list(job.hostnames) or None})
    task: dict[str, Json] = {
        "name": job.name,
        "image": {"docker": image} if kind == "docker" and image else {"beaker": job.image},
        "command": ["/bin/sh", "-euc", SCRIPT, "rlkit-launch"],
        "arguments": list(job.command),
        "envVars": _make_variables(job),
        "datasets": [
            {"source": {_SOURCE_FIELDS.get(mount.kind, mount.kind): mount.source}, "mountPath": mount.target}
            for mount in job.mounts
        ],
        "result": {"path": RESULTS},
        "resources": _drop_none({"gpuCount": job.gpus, "cpuCount": job.cpus, "memory": job.memory}),
        "context": context,
        "hostNetworking": job.host_networking,
        **_drop_none({"timeout": job.timeout, "replicas": job.replicas if job.replicas > 1 else None}),
        **_drop_none({"constraints": constraints or None}),
    }
    return {
        "version": "v2",
        **_drop_none({"description": job.description, "budget": job.budget}),
        "tasks": [task],
        **({"retry": {"allowedTaskRetries": job.retries}} if job.retries else {}),
    }


def is_persistent(job: Job, path: str) -> bool:
    """Return whether a mount preserves files at `path` after the container ends."""
    folder = PurePosixPath(path)
    return any(folder.is_relative_to(mount.target) for mount in job.mounts if mount.kind in ("weka", "host", "volume"))


def list_warnings(job: Job) -> list[str]:
    """Return warnings about a job, one line each."""
    env, messages = job.env or {}, list[str]()
    runs = env.get(RUNS_VARIABLE, RESULTS)
    if is_training_command(job.command) and job.preemptible is not False and not is_persistent(job, runs):
        messages.append(
            f"runs are written to {runs}, which is not on a mount: a preempted job would start from scratch; set "
            "--mount, and --runs-dir to a folder on it"
        )
    if not any(name in env or name in (job.secrets or {}) for name in _SERVICE_VARIABLES):
        messages.append(
            "the job has no TINKER_API_KEY, so it would train with the embedded engine: set --secret TINKER_API_KEY"
        )
    if job.replicas > 1 and is_training_command(job.command):
        messages.append("each replica would train its own run of the same name: use one replica")
    return messages


def to_yaml(specification: Mapping[str, Json]) -> str:
    """Render a specification as YAML, with multi-line texts as literal blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    return yaml.dump(dict(specification), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def make_restartable(command: Sequence[str], *, name: str) -> list[str]:
    """Return a command that resumes its run when its job restarts.

    Only `rlkit train` is changed: `--resume` is added, and `--name` if the run has no name. `name` must be unique.
    """
    words = list(command)
    if not is_training_command(words) or "--dry-run" in words:
        return words
    if not any(word == "--name" or word.startswith(("--name=", "name=")) for word in words):
        words += ["--name", name]
    if "--resume" not in words:
        words.append("--resume")
    return words


def is_training_command(command: Sequence[str]) -> bool:
    """Return whether a command runs `rlkit train`, directly or through `uv run` or `python -m`."""
    return any(word == "train" and PurePosixPath(program).name == "rlkit" for program, word in pairwise(command))


def parse_priority(text: str) -> Priority:
    """Parse a priority; UsageError if it is invalid."""
    if text not in PRIORITIES:
        raise UsageError(f"--priority: {text!r} is not one of {', '.join(PRIORITIES)}.{did_you_mean(text, PRIORITIES)}")
    return text


def parse_variables(words: Sequence[str], *, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Parse variables: `NAME=VALUE`, or `NAME` for the value in `environ`; UsageError if that is not set."""
    variables = dict[str, str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and name not in environ:
            raise UsageError(f"--env: {name} is not set here: write --env {name}=VALUE")
        variables[name] = value if equals else environ[name]
    return variables


def parse_secrets(words: Sequence[str]) -> dict[str, str]:
    """Parse secrets: `NAME=SECRET`, or `NAME` for a secret of the same name."""
    return {name: secret or name for name, _, secret in (word.partition("=") for word in words)}


def _make_variables(job: Job) -> list[Json]:
    variables = dict(job.env or {})
    if job.code is not None:
        variables |= {"RLKIT_REPOSITORY": job.code.repository, "RLKIT_COMMIT": job.code.commit}
    if job.install is not None:
        variables["RLKIT_INSTALL"] = job.install
    values: list[Json] = [{"name": name, "value": value} for name, value in variables.items()]
    return [*values, *({"name": name, "secret": secret} for name, secret in (job.secrets or {}).items())]


def _drop_none(fields: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in fields.items() if value is not None}
