"""The section that says which services a run is shown by, besides its own folder.

Invariant: none is on unless it is named, since what a run says and samples leaves the machine with most of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlkit.config.schema.section import Section

type Rollouts = Annotated[int, Field(ge=0)]


class WandbConfig(Section):
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
    rollouts: Rollouts = 8
    """Rollouts of each step that are shown in a table, drawn at random; one of them is shown as a page, too. 0 for
    none."""


class TrackioConfig(Section):
    """Trackio, which keeps runs in a database on this machine."""

    project: str = "rlkit"
    """The project that the run is shown in."""
    name: str | None = None
    """The run's name there; null for the name of the run."""


class TensorboardConfig(Section):
    """TensorBoard: files of events, which `tensorboard --logdir` shows."""

    directory: str | None = None
    """Where they are written; null for `tensorboard` in the run's folder."""


class DocentConfig(Section):
    """Docent of Transluce: the rollouts themselves, to be read and searched."""

    collection: str | None = None
    """Name of the collection that is made for the run; null for the name of the run."""
    rollouts: Rollouts = 0
    """Rollouts of each step that are sent, drawn at random; 0 for all of them."""
    url: str | None = None
    """Address of a Docent server of one's own; null for Transluce's."""


class TrackConfig(Section):
    """Who else is told of the run, if anyone. Each is fed from the run's folder by a process of its own."""

    wandb: WandbConfig | None = None
    """`{}` for Weights & Biases with its defaults; null does without it."""
    trackio: TrackioConfig | None = None
    """`{}` for Trackio with its defaults; null does without it."""
    tensorboard: TensorboardConfig | None = None
    """`{}` for TensorBoard with its defaults; null does without it."""
    docent: DocentConfig | None = None
    """`{}` for Docent with its defaults; null does without it."""
