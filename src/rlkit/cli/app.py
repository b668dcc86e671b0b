"""The commands and their options. Each body is imported when it runs, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlkit.cli.checkpoints.commands import checkpoints_app
from rlkit.cli.common.guard import command
from rlkit.cli.common.options import Configs, Debug, Help, Json, NoPanel, Quiet, Uploads
from rlkit.cli.launch.commands import launch_app
from rlkit.cli.tasks.commands import tasks_app
from rlkit.errors import UsageError

app = typer.Typer(
    help="Post-train open-weight language models by reinforcement learning through the Tinker API.",
    epilog="Exit codes: 0 done, 1 the run failed, 2 bad usage or configuration, 3 something is missing, "
    "4 the budget is reached, 130 interrupted with a checkpoint.",
    no_args_is_help=True,
    # Drawing help with rich takes four times as long as everything else that --help does.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at a configuration.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(launch_app, name="launch")
app.add_typer(tasks_app, name="tasks")

import_app = typer.Typer(help="Convert configurations of other programs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(import_app, name="import")


def _version(asked: bool) -> None:
    if asked:
        from rlkit.cli.common.versions import rlkit_version

        typer.echo(f"rlkit {rlkit_version()}")
        raise typer.Exit


@config_app.callback(add_help_option=False)
def config_root(show_help: Help = False) -> None:
    """Look at a configuration."""


@import_app.callback(add_help_option=False)
def import_root(show_help: Help = False) -> None:
    """Convert configurations of other programs."""


@app.callback(add_help_option=False)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    show_help: Help = False,
) -> None:
    """Post-train open-weight language models by reinforcement learning through the Tinker API."""


@app.command()
def train(  # noqa: PLR0917  Typer reads options from parameters of any kind
    config: Configs,
    name: Annotated[str | None, typer.Option(help="Name of the run and of its folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run of that name, if there is one.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    no_panel: NoPanel = False,
    openreward: Uploads = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Play it in small without the service, and estimate price and time.")
    ] = False,
    pilot: Annotated[
        int | None,
        typer.Option(min=1, help="With --dry-run: groups that are played on the service after all, to measure it."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Train a model. Ctrl-C finishes the step and saves; a second one stops at once."""
    with command(json=json, debug=debug) as output:
        if dry_run:
            from rlkit.cli.rehearse import run as rehearse

            if resume:
                raise UsageError("--resume has no effect on a dry run, which begins anew: leave it out")
            if openreward:
                raise UsageError("--openreward has no effect on a dry run: leave it out")
            raise typer.Exit(rehearse(config, output, name=name, pilot=pilot or 0, quiet=quiet))
        if pilot is not None:
            raise UsageError("--pilot has no effect: give --dry-run too")
        from rlkit.cli.train import run

        raise typer.Exit(
            run(config, output, name=name, resume=resume, quiet=quiet, panel=not no_panel, openreward=openreward)
        )


@app.command()
def resume(  # noqa: PLR0917  Typer reads options from parameters of any kind
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")],
    values: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="What is to be different, such as steps=200.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    no_panel: NoPanel = False,
    openreward: Uploads = False,
    debug: Debug = False,
) -> None:
    """Go on with a run.

    It was interrupted, or it is to train for longer. Its weights are those of the last checkpoint; the steps since then
    are taken again from what was recorded.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.train import resume

        raise typer.Exit(resume(run, values or [], output, quiet=quiet, panel=not no_panel, openreward=openreward))


@app.command("eval")
def evaluate(  # noqa: PLR0917  Typer reads options from parameters of any kind
    config: Configs,
    checkpoint: Annotated[
        str | None, typer.Option(help="tinker:// path of the weights; without it, the model as it is.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure a model there, which speaks OpenAI's protocol, instead.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name at the endpoint.")] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="Print a line for each task, too.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure a model without training it.

    It plays `eval.envs`, or else the environments of training, greedily.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.evaluate import run

        raise typer.Exit(
            run(config, output, checkpoint=checkpoint, tasks=tasks, quiet=quiet, endpoint=endpoint, model=model)
        )


@config_app.command("show")
def config_show(config: Configs, json: Json = False, debug: Debug = False) -> None:
    """Print the whole configuration, with the place that each value comes from."""
    with command(json=json, debug=debug) as output:
        from rlkit.cli.config import show

        raise typer.Exit(show(config, output))


@config_app.command("schema")
def config_schema(
    json: Annotated[bool, typer.Option("--json", help="The same, on one line.")] = False, debug: Debug = False
) -> None:
    """Print the JSON schema of configurations, for editors."""
    with command(json=json, debug=debug, dotenv=False) as output:
        from rlkit.cli.config import schema

        raise typer.Exit(schema(output))


@import_app.command("openreward-config")
def import_openreward_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A tinker-config.yaml.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the rlkit configuration of a tinker-config.yaml of OpenReward's cookbook.

    What a person should know about it goes to stderr.
    """
    with command(json=json, debug=debug, dotenv=False) as output:
        from rlkit.cli.imports import openreward_config

        raise typer.Exit(openreward_config(file, output))


@app.command()
def export(  # noqa: PLR0917  Typer reads options from parameters of any kind
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of a run, its folder, or a tinker://…/weights/… path.")
    ],
    to: Annotated[Path, typer.Option(metavar="DIR", help="A folder that does not exist.")],
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; the newest by default.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best one by best.metric.")] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model for transformers, not a LoRA adapter for peft.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the weights of a run for other programs."""
    with command(json=json, debug=debug) as output:
        from rlkit.cli.checkpoints.show import export as write

        raise typer.Exit(write(run, to, output, step=step, best=best, form="merged" if merged else "adapter"))


@app.command()
def sync(  # noqa: PLR0917  Typer reads options from parameters of any kind
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")],
    to: Annotated[str, typer.Option(help="wandb, trackio, tensorboard or docent.")],
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="A setting of the service, such as project=sums.", show_default=False),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Send everything, to a new run of the service.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until standard input ends: how a run that is trained is sent.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Send a run to a service that shows runs.

    What it has already is not sent again. The settings are those of `track` in the run's configuration.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.sync import run as send

        if again and follow:
            raise UsageError("--again and --follow are two ways to begin: give one")
        raise typer.Exit(send(run, to, values or [], output, again=again, follow=follow))


@app.command()
def serve(  # noqa: PLR0917  Typer reads options from parameters of any kind
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads of the model; one for each core by default.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where models are: cpu or cuda; the GPU by default, if there is one.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of its checkpoints.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="Make this model ready at once; may be given several times.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run the embedded engine alone.

    Any program that speaks to Tinker can use it, until Ctrl-C.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.serve import EngineOptions, run

        server = EngineOptions(host=host, port=port, threads=threads, device=device, root=root, models=model or [])
        raise typer.Exit(run(output, server))


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist or is empty.")],
    name: Annotated[str | None, typer.Option(help="Name of the environment; the folder's by default.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Start a project.

    It gets an environment, its configuration, a test that passes and a README.
    """
    with command(json=json, debug=debug, dotenv=False) as output:
        from rlkit.cli.init import run

        raise typer.Exit(run(directory, output, name=name))


@app.command()
def check(  # noqa: PLR0917  Typer reads options from parameters of any kind
    target: Annotated[str, typer.Argument(help="A built-in environment, file.py:Name, or a configuration file.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="The same as --args.", show_default=False)
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An argument of the environment (a value of the configuration)."),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks that are tried.")] = 5,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds that one rollout may take.")] = 10.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the environment and of the odd replies.")] = 0,
    redteam: Annotated[
        bool, typer.Option("--redteam", help="Try the red team's cheats instead: none may earn a reward.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find what is wrong with an environment.

    Exit code 1 if something is; with --redteam, if a cheat earns more than an honest empty attempt.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.check import run

        given = [*(args or []), *(arguments or [])]
        raise typer.Exit(run(target, given, output, tasks=tasks, timeout_s=timeout_s, seed=seed, redteam=redteam))


@app.command()
def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Name of a run, or its folder.", show_default=False)
    ] = None,
    no_engine: Annotated[bool, typer.Option("--no-engine", help="Do not try the embedded engine.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find what is wrong with this machine, or with a run.

    Each thing comes with its fix. Exit code 3 if something that the machine needs is missing.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.doctor import examine_machine, examine_run

        if run is not None and no_engine:
            raise UsageError("--no-engine has no effect on a run: leave it out")
        raise typer.Exit(examine_machine(output, engine=not no_engine) if run is None else examine_run(run, output))


@app.command()
def audit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check that a run trains on the tokens that were sampled.

    Exit code 1 if one of them is not where it was sampled.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.audit import run as check_record

        raise typer.Exit(check_record(run, output))


@app.command()
def records(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")],
    best: Annotated[int, typer.Option(min=1, help="How many of each search, the best first.")] = 3,
    no_draw: Annotated[bool, typer.Option("--no-draw", help="Draw no pictures.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the best constructions of a search, and draw them.

    Each comes with what is proven of it. The pictures are PNG files beside the records, in the run's folder.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.records import run as list_records

        raise typer.Exit(list_records(run, output, best=best, draw=not no_draw))
