"""`rlkit launch`."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from rlkit.cli.common.output import Output


def beaker(
    output: Output,
    words: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="Command to run, after --.", show_default=False)
    ],
    *,
    workspace: Annotated[str | None, typer.Option(help="Workspace; your account's default if not set.")] = None,
    budget: Annotated[str | None, typer.Option(help="Budget that the job is charged to.")] = None,
    cluster: Annotated[list[str] | None, typer.Option(help="Cluster that the job may run on; repeatable.")] = None,
    hostname: Annotated[list[str] | None, typer.Option(help="Node that the job may run on; repeatable.")] = None,
    image: Annotated[str, typer.Option(help="Beaker image, or docker:NAME.")] = "rlkit",
    name: Annotated[str, typer.Option(help="Name of the task, and prefix of a generated run name.")] = "rlkit",
    experiment: Annotated[str | None, typer.Option(help="Name of the experiment; by default Beaker's choice.")] = None,
    description: Annotated[str | None, typer.Option(help="Description of the experiment.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs per replica; the hosted service needs none.")] = 0,
    cpus: Annotated[float | None, typer.Option(min=0.1, help="CPUs per replica.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory per replica, such as 32GiB.")] = None,
    priority: Annotated[str, typer.Option(help="Priority: low, normal, high, urgent or immediate.")] = "normal",
    preemptible: Annotated[
        bool | None,
        typer.Option(
            "--preemptible/--not-preemptible", help="Allow Beaker to preempt the job.", show_default="preemptible"
        ),
    ] = None,
    min_runtime: Annotated[str | None, typer.Option(help="Time before the job can be preempted, such as 2h.")] = None,
    retries: Annotated[int, typer.Option(min=0, help="Maximum retries of a failed job.")] = 0,
    replicas: Annotated[int, typer.Option(min=1, help="Number of concurrent replicas.")] = 1,
    host_networking: Annotated[bool, typer.Option("--host-networking", help="Use the network of the host.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Time limit of the job, such as 24h.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="Environment variable; repeatable. Not for secrets."),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=SECRET]", help="Environment variable from a workspace secret; repeatable."),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND:SOURCE:/PATH", help="Mount of KIND weka, dataset, host, result, volume or secret; repeatable."
        ),
    ] = None,
    runs_dir: Annotated[str | None, typer.Option(metavar="/PATH", help="Folder of runs, on a mount.")] = None,
    code: Annotated[str, typer.Option(help="Source of the code: git (the current commit) or image.")] = "git",
    install: Annotated[str | None, typer.Option(help="Command to run first, such as 'uv sync --frozen'.")] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Submit despite uncommitted changes; the job runs without them.")
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Print the log of the job until it ends.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the specification; needs no account.")] = False,
) -> None:
    """Submit a command to Beaker.

    A training run without a name gets a generated one, and resumes if the job is restarted.
    """
    from rlkit.launch import job
    from rlkit.launch.git_commit import parse_code

    submitted = job.Job(
        priority=job.parse_priority(priority),
        env={
            job.RUNS_VARIABLE: job.RESULTS,
            **job.parse_variables(env or []),
            **({} if runs_dir is None else {job.RUNS_VARIABLE: runs_dir}),
        },
        command=job.make_restartable(words, name=f"{name}-{secrets.token_hex(4)}"),
        name=name,
        image=image,
        budget=budget,
        description=description,
        clusters=cluster or [],
        hostnames=hostname or [],
        gpus=gpus,
        cpus=cpus,
        memory=memory,
        preemptible=None if min_runtime is not None and preemptible is None else preemptible is not False,
        min_runtime=min_runtime,
        retries=retries,
        replicas=replicas,
        host_networking=host_networking,
        timeout=timeout,
        secrets=job.parse_secrets(secret or []),
        mounts=[job.Mount.parse(text) for text in mount or []],
        code=parse_code(code, Path.cwd(), allow_dirty=allow_dirty),
        install=install,
    )
    for warning in job.list_warnings(submitted):
        output.note(warning)
    spec = job.make_spec(submitted)
    if dry_run:
        head = f"# workspace: {workspace or 'the default of your account'}\n"
        head += f"# experiment: {experiment or 'a name generated by Beaker'}\n"
        output.result({"workspace": workspace, "name": experiment, "spec": spec}, f"{head}{job.to_yaml(spec)}".rstrip())
        return
    from rlkit.launch.beaker import submit

    url = submit(spec, workspace=workspace, name=experiment, follow=follow, note=output.note)
    output.result({"url": url}, url)
