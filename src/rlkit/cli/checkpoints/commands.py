"""The commands of `rlkit checkpoints`, and their options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Never

import typer

from rlkit.cli.common.guard import command
from rlkit.cli.common.options import Debug, Help, Json
from rlkit.errors import UsageError

if TYPE_CHECKING:
    from rlkit.tools.export import Form

checkpoints_app = typer.Typer(
    help="Look after the weights that were saved.", no_args_is_help=True, rich_markup_mode=None
)

What = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN|PATH]…", help="Names of runs, their folders, or tinker:// paths.", show_default=False),
]
One = Annotated[str, typer.Argument(metavar="RUN|PATH", help="Name of a run, its folder, or a tinker:// path.")]
StateOf = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, its folder, or a tinker://…/weights/… path.")
]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist.")]
OfStep = Annotated[int | None, typer.Option(help="The checkpoint of this step; the newest by default.")]
Best = Annotated[bool, typer.Option("--best", help="The best one by best.metric.")]
Kind = Annotated[str | None, typer.Option(help="Only training, sampler or external weights.")]
OlderThan = Annotated[str | None, typer.Option(metavar="AGE", help="Only those made longer ago, such as 12h or 7d.")]
All = Annotated[bool, typer.Option("--all", help="Every checkpoint of the account.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


@checkpoints_app.callback(add_help_option=False)
def checkpoints_root(show_help: Help = False) -> None:
    """Look after the weights that were saved."""


@checkpoints_app.command("list")
def checkpoints_list(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Name of a run, or its folder.", show_default=False)
    ] = None,
    kind: Kind = None,
    older_than: OlderThan = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the checkpoints that the service keeps, newest first.

    All of them, or those that a run has saved.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.checkpoints.choosing import Filter
        from rlkit.cli.checkpoints.show import show_all

        raise typer.Exit(show_all(run, output, only=Filter.read(kind, older_than)))


@checkpoints_app.command("show")
def checkpoints_show(
    what: One, step: OfStep = None, best: Best = False, json: Json = False, debug: Debug = False
) -> None:
    """Print all that is known of a checkpoint."""
    with command(json=json, debug=debug) as output:
        from rlkit.cli.checkpoints.show import show

        raise typer.Exit(show(what, output, step=step, best=best))


@checkpoints_app.command("delete")
def checkpoints_delete(  # noqa: PLR0917  Typer reads options from parameters of any kind
    what: What = None,
    every: All = False,
    kind: Kind = None,
    older_than: OlderThan = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete checkpoints on the service, for good.

    It shows them and asks first.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.checkpoints.choosing import Filter
        from rlkit.cli.checkpoints.discard import delete

        only = Filter.read(kind, older_than)
        raise typer.Exit(delete(what or [], output, only=only, every=every, yes=yes, dry_run=dry_run))


@checkpoints_app.command("prune")
def checkpoints_prune(  # noqa: PLR0917  Typer reads options from parameters of any kind
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")],
    keep_last: Annotated[int, typer.Option(min=1, help="Newest checkpoints to keep.")] = 1,
    keep_best: Annotated[int, typer.Option(min=0, help="Best ones by best.metric to keep besides.")] = 1,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete the checkpoints of a run that are neither new nor good.

    It shows them and asks first.
    """
    with command(json=json, debug=debug) as output:
        from rlkit.cli.checkpoints.discard import prune

        raise typer.Exit(prune(run, output, keep_last=keep_last, keep_best=keep_best, yes=yes, dry_run=dry_run))


@checkpoints_app.command("ttl")
def checkpoints_ttl(  # noqa: PLR0917  Typer reads options from parameters of any kind
    what: What = None,
    days: Annotated[
        float | None,
        typer.Option(min=0.042, max=3650, help="Days from now until the service deletes them; an hour at least."),
    ] = None,
    never: Annotated[bool, typer.Option("--never", help="Keep them until somebody deletes them.")] = False,
    every: All = False,
    kind: Kind = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say when checkpoints expire."""
    with command(json=json, debug=debug) as output:
        from rlkit.cli.checkpoints.choosing import Filter
        from rlkit.cli.checkpoints.discard import set_ttl

        if (days is None) != never:
            raise UsageError("say when they expire: --days N, or --never")
        only = Filter.read(kind, older_than)
        raise typer.Exit(set_ttl(what or [], output, only=only, every=every, days=days, dry_run=dry_run))


@checkpoints_app.command("download")
def checkpoints_download(  # noqa: PLR0917  Typer reads options from parameters of any kind
    what: StateOf,
    directory: Directory,
    step: OfStep = None,
    best: Best = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the files of a checkpoint to a folder, as the service has them."""
    _write(what, directory, "raw", step=step, best=best, json=json, debug=debug)


@checkpoints_app.command("export")
def checkpoints_export(  # noqa: PLR0917  Typer reads options from parameters of any kind
    what: StateOf,
    directory: Directory,
    step: OfStep = None,
    best: Best = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model for transformers, not a LoRA adapter for peft.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the weights of a checkpoint to a folder that other programs load."""
    _write(what, directory, "merged" if merged else "adapter", step=step, best=best, json=json, debug=debug)


def _write(what: str, directory: Path, form: Form, *, step: int | None, best: bool, json: bool, debug: bool) -> Never:
    with command(json=json, debug=debug) as output:
        from rlkit.cli.checkpoints.show import export

        raise typer.Exit(export(what, directory, output, step=step, best=best, form=form))
