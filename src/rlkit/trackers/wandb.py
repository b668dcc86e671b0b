# wandb has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false
"""Weights & Biases.

Invariant: only data from the run's folder is sent. Code, diffs, the command line, console output and the list of
packages are not, because they may contain secrets.
"""

from __future__ import annotations

import html
import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rlkit._util.sections import Section
from rlkit.errors import MissingError
from rlkit.trackers.recorded_run import RecordedRollout, RecordedRun, RecordedStep
from rlkit.trackers.service import ServiceTracker
from rlkit.types import Json

if TYPE_CHECKING:
    import wandb

TABLE = "rollouts/table"
PAGE = "rollouts/one"

_CONVERSATION_MAX_CHARS = 20_000
"""Limit of a conversation in a table or page, because browsers cannot show larger tables."""

_TAG_CHARS = 64  # maximum length of a tag at Weights & Biases
_ID_BYTES = 4

_FINISH_S = 20.0  # time limit of the upload at the end of a run; `wandb sync` can send the rest from the disk
_COLUMNS = ("step", "env", "task", "member", "reward", "status", "stop", "version", "turns", "seconds", "conversation")


class WandbSettings(Section):
    """Weights & Biases."""

    project: str = "rlkit"
    """Project of the run."""
    entity: str | None = None
    """Team or user that owns the project; null for the account's default."""
    name: str | None = None
    """Name of the run at Weights & Biases; null for the name of the rlkit run."""
    tags: list[str] = Field(default_factory=list[str])
    """Additional tags; every run has the tags `model:…` and `lora_rank:…`."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files that `wandb sync` can upload later, and needs no account."""
    rollouts: Annotated[int, Field(ge=0)] = 8
    """Number of random rollouts of each step in a table; 0 for none. The first of these rollouts is also a page."""


class WandbTracker(ServiceTracker[WandbSettings]):
    """Send a run to Weights & Biases, or write files for `wandb sync`."""

    name = "wandb"
    settings_type = WandbSettings
    _run: wandb.Run

    def require(self) -> None:  # noqa: D102  inherited
        if self.settings.mode == "online" and not _has_login():
            raise MissingError(
                "track.wandb: there is no login for Weights & Biases: set WANDB_API_KEY, run `wandb login`, or set "
                "track.wandb.mode to offline"
            )

    def open(self, run: RecordedRun, state: Mapping[str, Json]) -> Mapping[str, Json]:  # noqa: D102  inherited
        import wandb

        identity = str(state.get("id") or secrets.token_hex(_ID_BYTES))
        tags = [*self.settings.tags, f"model:{run.model}", f"lora_rank:{run.lora_rank}"]
        self._run = wandb.init(
            project=self.settings.project,
            entity=self.settings.entity,
            name=self.settings.name or run.name,
            id=identity,
            resume="allow",
            tags=[tag[:_TAG_CHARS] for tag in tags],
            config=dict(run.config),
            mode="offline" if self.settings.mode == "offline" else None,
            dir=str(run.directory),
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                disable_code=True,
                program="rlkit",
                finish_timeout=_FINISH_S,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        return {"id": identity}

    def show(self, step: RecordedStep) -> None:  # noqa: D102  inherited
        import wandb

        values: dict[str, object] = {**step.metrics, "step": step.number}
        if self.settings.rollouts and (rollouts := step.sample_rollouts(self.settings.rollouts)):
            rows: list[Any] = [_row(step.number, rollout) for rollout in rollouts]
            values[TABLE] = wandb.Table(columns=list(_COLUMNS), data=rows)
            values[PAGE] = wandb.Html(render_page(rollouts[0], step.number), inject=False)
        self._run.log(values, step=step.number)

    def close(self, status: str) -> None:  # noqa: D102  inherited
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _has_login() -> bool:
    """Return whether Weights & Biases has a credential or does not need one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any("wandb" in host for host in hosts)


def _row(step: int, rollout: RecordedRollout) -> list[Any]:
    stop, version = (rollout.turns[-1].stop, rollout.turns[-1].version) if rollout.turns else ("", None)
    place = [step, rollout.env, rollout.task, rollout.member]
    end = [rollout.reward, rollout.status, stop, version, len(rollout.turns), rollout.seconds]
    return [*place, *end, rollout.text[:_CONVERSATION_MAX_CHARS]]


def render_page(rollout: RecordedRollout, step: int) -> str:
    """Render a rollout as an HTML page that highlights the model's completions."""
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    head = f"step {step} · {rollout.env} · {rollout.task} · {rollout.status} · {reward}"
    turns = "".join(
        f"<pre>{html.escape(turn.prompt[:_CONVERSATION_MAX_CHARS])}</pre>"
        f'<pre class="said">{html.escape(turn.completion[:_CONVERSATION_MAX_CHARS])}</pre>'
        f"<p>{html.escape(turn.stop)}, weights {turn.version}"
        f"{'' if turn.reward is None else f', reward {turn.reward:g}'}</p>"
        for turn in rollout.turns
    )
    error = "" if rollout.error is None else f"<pre>{html.escape(rollout.error)}</pre>"
    return (
        '<!doctype html><meta charset="utf-8"><style>body{font-family:sans-serif}pre{white-space:pre-wrap;'
        "background:#f4f4f4;padding:.6em;margin:.3em 0}.said{background:#e3edff}p{color:#666;font-size:.8em}</style>"
        f"<h4>{html.escape(head)}</h4>{turns}{error}"
    )
