"""A job for Beaker, as the specification that Beaker takes.

Invariant: the command reaches the job word for word, whatever its words hold: they are arguments of a shell's script
and never part of its text. No value of a secret is in a specification, only names of secrets that Beaker keeps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, cast, get_args

from rlkit._util.redaction import redact
from rlkit.config.loading.secrets import is_secret
from rlkit.config.loading.secrets import redact as redact_shapes
from rlkit.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from rlkit.launch.git_commit import GitCommit
    from rlkit.types import Json

type Priority = Literal["low", "normal", "high", "urgent", "immediate"]
type MountKind = Literal["weka", "dataset", "host", "result", "volume", "secret"]

PRIORITIES: tuple[Priority, ...] = get_args(Priority.__value__)
_SOURCES: Mapping[MountKind, str] = {
    "weka": "weka",
    "dataset": "beaker",
    "host": "hostPath",
    "result": "result",
    "volume": "volume",
    "secret": "secret",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

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
"""What the job runs: it fetches the code and becomes the command, which so gets the signal of a preemption itself."""

RESULTS = "/results"

RUNS_VARIABLE = "RLKIT_RUNS_DIR"
_SERVICE_VARIABLES = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL")


@dataclass(frozen=True, slots=True)
class Mount:
    """Something that is there in the container, by its name or its path on the host."""

    kind: MountKind
    source: str
    target: str

    @classmethod
    def parse(cls, text: str) -> Mount:
        """Parse `weka:bucket:/path`, `dataset:name:/path` and so on; UsageError for anything else."""
        kind, _, rest = text.partition(":")
        source, _, target = rest.rpartition(":")
        if kind not in _SOURCES or not source or not target.startswith("/"):
            known = ", ".join(_SOURCES)
            raise UsageError(
                f"--mount: {text!r} is not KIND:SOURCE:/PATH with a kind of {known}.{did_you_mean(kind, _SOURCES)}"
            )
        return cls(cast("MountKind", kind), source, target)


@dataclass(frozen=True, slots=True)
class Job:
    """A command, and the machines that run it.

    Args:
        image: `docker:NAME`, or the name of an image that Beaker keeps.
        budget: budget that pays; None for the workspace's own.
        clusters: clusters that it may run on; empty for any.
        hostnames: nodes that it may run on; empty for any.
        gpus: GPUs of each replica; `cpus` and `memory` likewise, None for no limit.
        preemptible: it may be stopped for a more urgent one, and is started again; None for Beaker's own default.
        min_runtime: time that it is safe from that, such as `2h`; instead of `preemptible`.
        timeout: time after which it is stopped, such as `24h`.
        secrets: names of secrets that Beaker keeps, by the name of the variable that gets each.
        code: a commit that is fetched before the command runs; None for the content of the image.
        install: a command that is run before it, in the code's folder.
        results: folder that Beaker keeps.
    """

    command: Sequence[str]
    name: str = "rlkit"
    image: str = "docker:rlkit"
    budget: str | None = None
    description: str | None = None
    clusters: Sequence[str] = ()
    hostnames: Sequence[str] = ()
    gpus: int = 0
    cpus: float | None = None
    memory: str | None = None
    priority: Priority = "normal"
    preemptible: bool | None = True
    min_runtime: str | None = None
    retries: int = 0
    replicas: int = 1
    host_networking: bool = False
    timeout: str | None = None
    env: Mapping[str, str] | None = None
    secrets: Mapping[str, str] | None = None
    mounts: Sequence[Mount] = ()
    code: GitCommit | None = None
    install: str | None = None
    results: str = RESULTS

    def __post_init__(self) -> None:
        if not self.command:
            raise UsageError(
                "there is no command: write it after --, as in `rlkit launch beaker -- rlkit train config.yaml`"
            )
        if self.preemptible is not None and self.min_runtime is not None:
            raise UsageError("--min-runtime says how long a job cannot be preempted: leave --preemptible out")
        for name, value in (self.env or {}).items():
            if not _NAME.fullmatch(name):
                raise UsageError(f"--env: {name!r} is no name of a variable")
            if is_secret(name, value):
                raise UsageError(
                    f"--env {name}: its value looks like a secret, and anyone who sees the job would see it: keep it "
                    f"in Beaker (`beaker secret write {name} …`) and give --secret {name}"
                )
        public = {"--description": self.description, "--install": self.install}
        public |= {f"--env {name}": value for name, value in (self.env or {}).items()}
        for place, text in [*(("the command", word) for word in self.command), *public.items()]:
            if text is not None and redact(redact_shapes(text)) != text:
                raise UsageError(
                    f"{place} holds a secret, and anyone who sees the job would see it: keep it in Beaker (`beaker "
                    "secret write NAME …`) and give --secret NAME"
                )


def make_spec(job: Job) -> dict[str, Json]:
    """The specification of an experiment, version 2, as JSON."""
    context: dict[str, Json] = {"priority": job.priority}
    if job.min_runtime is not None:
        context |= {"minRuntime": job.min_runtime, "autoResume": True}
    elif job.preemptible is not None:
        context["preemptible"] = job.preemptible
    task: dict[str, Json] = {
        "name": job.name,
        "image": _image(job.image),
        "command": ["/bin/sh", "-euc", SCRIPT, "rlkit-launch"],
        "arguments": list(job.command),
        "envVars": _variables(job),
        "datasets": [
            {"source": {_SOURCES[mount.kind]: mount.source}, "mountPath": mount.target} for mount in job.mounts
        ],
        "result": {"path": job.results},
        "resources": _given({"gpuCount": job.gpus, "cpuCount": job.cpus, "memory": job.memory}),
        "context": context,
        "hostNetworking": job.host_networking,
        **_given({"timeout": job.timeout, "replicas": job.replicas if job.replicas > 1 else None}),
    }
    constraints = _given({"cluster": list(job.clusters) or None, "hostname": list(job.hostnames) or None})
    if constraints:
        task["constraints"] = constraints
    return {
        "version": "v2",
        **_given({"description": job.description, "budget": job.budget}),
        "tasks": [task],
        **({"retry": {"allowedTaskRetries": job.retries}} if job.retries else {}),
    }


def is_persistent(job: Job, path: str) -> bool:
    """Whether what is written to a path of the container outlives the container."""
    place = PurePosixPath(path)
    return any(place.is_relative_to(mount.target) for mount in job.mounts if mount.kind in ("weka", "host", "volume"))


def list_warnings(job: Job) -> list[str]:
    """Return what a person should know of a job before it runs, a line each."""
    env, found = job.env or {}, list[str]()
    runs = env.get(RUNS_VARIABLE, RESULTS)
    if trains(job.command) and job.preemptible is not False and not is_persistent(job, runs):
        found.append(
            f"runs are written to {runs}, which no mount keeps: a job that is preempted begins anew; give "
            "--mount and --runs-dir below it"
        )
    if not any(name in env or name in (job.secrets or {}) for name in _SERVICE_VARIABLES):
        found.append(
            "the job has no TINKER_API_KEY, and would train with the embedded engine: give --secret TINKER_API_KEY"
        )
    if job.replicas > 1 and trains(job.command):
        found.append("each replica trains a run of its own, and all of one name: one replica is enough")
    return found


def to_yaml(described: Mapping[str, Json]) -> str:
    """Return a specification as YAML, in which the lines of a script are lines."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    return yaml.dump(dict(described), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def make_restartable(command: Sequence[str], *, name: str) -> list[str]:
    """Return a command that goes on where it was stopped when its job is started again.

    Only `rlkit train` is changed: it gets `--resume`, and `name` if its run has none. That must be the same each time,
    and no other job's.
    """
    words = list(command)
    if not trains(words) or "--dry-run" in words:
        return words
    if not any(word == "--name" or word.startswith(("--name=", "name=")) for word in words):
        words += ["--name", name]
    if "--resume" not in words:
        words.append("--resume")
    return words


def trains(command: Sequence[str]) -> bool:
    """Return whether a command is `rlkit train`, also behind `uv run` or `python -m`."""
    return any(word == "train" and PurePosixPath(before).name == "rlkit" for before, word in pairwise(command))


def parse_priority(text: str) -> Priority:
    """Return a priority; UsageError if there is none of that name."""
    if text not in PRIORITIES:
        raise UsageError(f"--priority: {text!r} is none of {', '.join(PRIORITIES)}.{did_you_mean(text, PRIORITIES)}")
    return text


def parse_variables(words: Sequence[str], *, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables from `NAME=VALUE`, or `NAME` for its value here; UsageError if it has none."""
    variables = dict[str, str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals and name not in environ:
            raise UsageError(f"--env: {name} is not set here: write --env {name}=VALUE")
        variables[name] = value if equals else environ[name]
    return variables


def parse_secrets(words: Sequence[str]) -> dict[str, str]:
    """Return secrets by variable from `NAME=SECRET`, or `NAME` for a secret of the same name."""
    return {name: secret or name for name, _, secret in (word.partition("=") for word in words)}


def _image(image: str) -> dict[str, Json]:
    kind, _, name = image.partition(":")
    return {"docker": name} if kind == "docker" and name else {"beaker": image}


def _variables(job: Job) -> list[Json]:
    plain = dict(job.env or {})
    if job.code is not None:
        plain |= {"RLKIT_REPOSITORY": job.code.repository, "RLKIT_COMMIT": job.code.commit}
    if job.install is not None:
        plain["RLKIT_INSTALL"] = job.install
    values: list[Json] = [{"name": name, "value": value} for name, value in plain.items()]
    return [*values, *({"name": name, "secret": secret} for name, secret in (job.secrets or {}).items())]


def _given(fields: Mapping[str, Json]) -> dict[str, Json]:
    return {name: value for name, value in fields.items() if value is not None}
