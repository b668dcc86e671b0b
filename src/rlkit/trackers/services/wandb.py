# wandb has no complete types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportPrivateImportUsage=false
"""Weights & Biases.

Invariant: nothing is sent but what the run's folder says: no code, no diff, no command line, no console and no list of
packages, in all of which a secret might stand.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import wandb

from rlkit.trackers.feed import Rollout, Step, Told
from rlkit.trackers.services.sampled import SHOWN_CHARS, conversation, drawn_from, page

if TYPE_CHECKING:
    from rlkit.types import Json

TABLE = "rollouts/table"
PAGE = "rollouts/one"

_TAG_CHARS = 64
"""The longest tag that Weights & Biases takes."""

_ID_BYTES = 4

_FINISH_S = 20.0
"""What the service may take at the end; what it has not got by then is on the disk, for `wandb sync`."""

_COLUMNS = ("step", "env", "task", "member", "reward", "status", "stop", "version", "turns", "seconds", "conversation")


class WandbSink:
    """Shows a run at Weights & Biases, or writes the files that `wandb sync` uploads.

    Args:
        project: that it is shown in.
        entity: that the project belongs to; None for the account's default.
        name: of the run there; None for the run's own.
        tags: of the run, besides its model and rank.
        offline: only write files.
        rollouts: of each step that are shown.
    """

    def __init__(
        self, *, project: str, entity: str | None, name: str | None, tags: Sequence[str], offline: bool, rollouts: int
    ) -> None:
        self._project = project
        self._entity = entity
        self._name = name
        self._tags = tags
        self._offline = offline
        self._rollouts = rollouts
        self._run: wandb.Run | None = None

    def open(self, run: Told, state: Mapping[str, Json]) -> Mapping[str, Json]:  # noqa: D102  of the protocol
        identity = str(state.get("id") or secrets.token_hex(_ID_BYTES))
        tags = [*self._tags, f"model:{run.model}", f"lora_rank:{run.lora_rank}"]
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=self._name or run.name,
            id=identity,
            resume="allow",
            tags=[tag[:_TAG_CHARS] for tag in tags],
            config=dict(run.config),
            mode="offline" if self._offline else None,
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

    def step(self, step: Step) -> None:  # noqa: D102  of the protocol
        assert self._run is not None  # opened before
        shown: dict[str, object] = {**step.metrics, "step": step.number}
        if self._rollouts and (drawn := drawn_from(step.rollouts(), self._rollouts, step.number)):
            rows: list[Any] = [_row(step.number, one) for one in drawn]
            shown[TABLE] = wandb.Table(columns=list(_COLUMNS), data=rows)
            shown[PAGE] = wandb.Html(page(drawn[0], step.number), inject=False)
        self._run.log(shown, step=step.number)

    def close(self, status: str) -> None:  # noqa: D102  of the protocol
        if self._run is not None:
            self._run.summary["status"] = status
            self._run.finish(exit_code=1 if status == "failed" else 0)


def _row(step: int, rollout: Rollout) -> list[Any]:
    last = rollout.turns[-1] if rollout.turns else None
    return [
        step,
        rollout.env,
        rollout.task,
        rollout.member,
        rollout.reward,
        rollout.status,
        "" if last is None else last.stop,
        None if last is None else last.version,
        len(rollout.turns),
        rollout.seconds,
        conversation(rollout)[:SHOWN_CHARS],
    ]
