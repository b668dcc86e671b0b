# wandb has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false
"""Weights & Biases.

Invariant: nothing is sent but what the run's folder says: no code, no diff, no command line, no console and no list of
packages, in all of which a secret might stand.
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

if TYPE_CHECKING:
    import wandb

    from rlkit.types import Json

TABLE = "rollouts/table"
PAGE = "rollouts/one"

_SHOWN_CHARS = 20_000
"""More of a conversation makes a table that no browser shows; the rest is in the run's folder."""

_TAG_CHARS = 64
"""The longest tag that Weights & Biases takes."""

_ID_BYTES = 4

_FINISH_S = 20.0
"""What the service may take at the end; what it has not got by then is on the disk, for `wandb sync`."""

_COLUMNS = ("step", "env", "task", "member", "reward", "status", "stop", "version", "turns", "seconds", "conversation")


class WandbSettings(Section):
    """Weights & Biases."""

    project: str = "rlkit"
    """The project that the run is shown in."""
    entity: str | None = None
    """The team or user that the project belongs to; null for the account's default."""
    name: str | None = None
    """The run's name there; null for the name of the run."""
    tags: list[str] = Field(default_factory=list[str])
    """Labels, besides `model:…` and `lora_rank:…`, which every run gets."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files that `wandb sync` uploads later, and needs no account."""
    rollouts: Annotated[int, Field(ge=0)] = 8
    """Rollouts of each step that are shown in a table, drawn at random; one of them is shown as a page, too. 0 for
    none."""


class WandbTracker(ServiceTracker[WandbSettings]):
    """Shows a run at Weights & Biases, or writes the files that `wandb sync` uploads."""

    name = "wandb"
    settings_type = WandbSettings
    _run: wandb.Run

    def require(self) -> None:  # noqa: D102  inherited
        if self.settings.mode == "online" and not _has_login():
            raise MissingError(
                "track.wandb: WANDB_API_KEY is not set, and nobody has logged in with `wandb login`: set it, or set "
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

        shown: dict[str, object] = {**step.metrics, "step": step.number}
        if self.settings.rollouts and (rollouts := step.sample_rollouts(self.settings.rollouts)):
            rows: list[Any] = [_row(step.number, rollout) for rollout in rollouts]
            shown[TABLE] = wandb.Table(columns=list(_COLUMNS), data=rows)
            shown[PAGE] = wandb.Html(render_page(rollouts[0], step.number), inject=False)
        self._run.log(shown, step=step.number)

    def close(self, status: str) -> None:  # noqa: D102  inherited
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _has_login() -> bool:
    """Return whether Weights & Biases will find a credential, or needs none."""
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
    return [*place, *end, rollout.text[:_SHOWN_CHARS]]


def render_page(rollout: RecordedRollout, step: int) -> str:
    """Return a rollout as a page of its own, what the model said set off from what it was given."""
    reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    head = f"step {step} · {rollout.env} · {rollout.task} · {rollout.status} · {reward}"
    turns = "".join(
        f"<pre>{html.escape(turn.prompt[:_SHOWN_CHARS])}</pre>"
        f'<pre class="said">{html.escape(turn.completion[:_SHOWN_CHARS])}</pre>'
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
