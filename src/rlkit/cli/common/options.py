"""Arguments and options shared by several commands.

Invariant: an option has the same meaning in every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Configs = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG", help="YAML files, and overrides such as steps=20. Later files override earlier files."
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run name, or run folder.")]
OptionalRun = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Run name, or run folder.", show_default=False)
]
RunOrState = Annotated[str, typer.Argument(metavar="RUN", help="Run name, run folder, or tinker://…/weights/… path.")]
CheckpointStep = Annotated[int | None, typer.Option(help="Step of the checkpoint; the newest by default.")]
Best = Annotated[bool, typer.Option("--best", help="Use the best checkpoint by best.metric.")]
Merged = Annotated[
    bool, typer.Option("--merged", help="Export a merged model for transformers instead of a LoRA adapter for peft.")
]
NewFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create.")]
RedTeam = Annotated[bool, typer.Option("--redteam", help="Try cheats. No cheat may earn more than an empty attempt.")]
NoPanel = Annotated[bool, typer.Option("--no-panel", help="Print plain lines instead of the live panel.")]
Uploads = Annotated[
    bool, typer.Option("--openreward", help="Upload rollouts of OpenReward environments; same as track.openreward={}.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Skip the confirmation.")]
