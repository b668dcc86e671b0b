"""Environments in the format of verifiers 0.4, such as those of Prime Intellect's Environments Hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b

from pydantic import JsonValue

from rlkit.envs.verifiers.installation import install, run
from rlkit.envs.verifiers.task import VerifiersTask, share_process
from rlkit.errors import UsageError
from rlkit.types import Json

__all__ = ["verifiers"]

AGENT: JsonValue = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Default of `config.agent`: a conversation with the environment's tools, which runs no code of the model. verifiers'
own default, a shell in a hosted sandbox, needs an account."""


def verifiers(
    *,
    id: str,
    packages: Sequence[str] = (),
    config: dict[str, JsonValue] | None = None,
    taskset: dict[str, JsonValue] | None = None,
    select: dict[str, JsonValue] | None = None,
    secrets: Sequence[str] = (),
    pin: Callable[[Json], Json] = lambda now: now,
) -> Sequence[VerifiersTask]:
    """Return tasks of an environment in the format of verifiers, which is installed apart from rlkit.

    Args:
        id: name of the taskset, as for `vf-eval`.
        packages: packages to install: `name==version`, `name @ URL`, or a local folder, which is installed in place.
            verifiers itself is added, unless it is listed.
        config: verifiers' settings of the environment, without the taskset; by default, a conversation without a
            sandbox.
        taskset: settings of the taskset, such as its split.
        select: verifiers' selection of tasks: `include`, `exclude`, `shuffle`, `seed`, `skip` and `limit`.
        secrets: names of variables with secrets that the environment may read.
        pin: maps the current tasks to those recorded when the run began.

    Raises:
        UsageError: the packages cannot be installed, the environment cannot be loaded, or the tasks of a resumed run
            have changed.
        MissingError: uv is not installed, or a secret is not set.
    """
    installation = install(packages, secrets)
    settings = json.dumps({**(config or {"agent": AGENT}), "taskset": {**(taskset or {}), "id": id}})
    command = installation.make_command("list", settings, json.dumps(select or {}))
    rows = json.loads(run(command, field="verifiers", variables=installation.make_variables()).splitlines()[-1])
    digest = blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()
    state: dict[str, Json] = {"tasks": digest, "versions": installation.list_versions()}
    if pin(state) != state:
        raise UsageError("packages: the tasks or versions are not those of tasks.json, with which the run began")
    process = share_process(installation, settings)
    return [VerifiersTask(row["id"] or str(row["data"]["idx"]), row["data"], process) for row in rows]
