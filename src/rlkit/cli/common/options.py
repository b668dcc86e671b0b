"""Arguments and options that several commands have.

Invariant: one name means the same in every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Configs = Annotated[
    list[str],
    typer.Argument(
        metavar="CONFIG", help="YAML files, the later over the earlier, and then single values such as steps=20."
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run, or its folder.")]
OptionalRun = Annotated[
    str | None, typer.Argument(metavar="[RUN]", help="Name of a run, or its folder.", show_default=False)
]
RunOrState = Annotated[
    str, typer.Argument(metavar="RUN", help="Name of a run, its folder, or a tinker://…/weights/… path.")
]
OfStep = Annotated[int | None, typer.Option(help="The checkpoint of this step; the newest by default.")]
Best = Annotated[bool, typer.Option("--best", help="The best one by best.metric.")]
Merged = Annotated[
    bool, typer.Option("--merged", help="The whole model for transformers, not a LoRA adapter for peft.")
]
NewFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist.")]
RedTeam = Annotated[bool, typer.Option("--redteam", help="Try the red team's cheats instead: none may earn a reward.")]
NoPanel = Annotated[bool, typer.Option("--no-panel", help="Plain lines also on a terminal.")]
Uploads = Annotated[
    bool, typer.Option("--openreward", help="Upload rollouts of OpenReward's environments; needs OPENREWARD_API_KEY.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result.")]
