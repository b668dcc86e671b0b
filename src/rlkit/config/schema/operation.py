"""The sections of the service, its prices, checkpoints, early stopping, and the chat format.

Invariant: a setting without effect is an error. The docstring of a field gives the reason for its default.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlkit._util.sections import Positive, Section


class CheckpointConfig(Section):
    """Checkpoints of the weights. The last step is always saved."""

    every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints; 0 saves only the last step."""
    ttl_days: Annotated[float, Field(ge=1 / 24, le=3650)] | None = 30.0
    """Days until the service deletes a checkpoint, because storage is billed; null for no expiry."""
    keep_last: Positive | None = None
    """Number of newest checkpoints to keep during the run; older checkpoints are deleted on the service permanently.
    Null deletes none."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """With `keep_last`: number of best checkpoints, by `best.metric`, that are kept in addition."""

    def _check_section(self) -> None:
        if self.keep_last is None:
            self.refuse_unused("keep_best", fix="set keep_last, because otherwise no checkpoint is deleted")


class BestConfig(Section):
    """Selection of the best weights, and early stopping."""

    metric: str | None = None
    """Metric that selects the best weights, as named in `metrics.jsonl`; null for `eval/all/reward/mean` if the run has
    evaluations. Evaluated steps are also saved, so that the best weights are available."""
    lower_is_better: bool = False
    """Lower values of the metric are better."""
    patience: Positive | None = None
    """Consecutive values without improvement after which training ends; null for no early stopping."""
    min_gain: Annotated[float, Field(ge=0)] = 0.0
    """With `patience`: minimum improvement over the best value so far."""
    goal: float | None = None
    """Value of the metric at which training ends; null for no goal."""

    def _check_section(self) -> None:
        if self.patience is None:
            self.refuse_unused("min_gain", fix="set patience")


class PricesConfig(Section):
    """Prices in US dollars per million tokens; all null for rlkit's price table."""

    prefill: Annotated[float, Field(ge=0)] | None = None
    """Price of prompt tokens."""
    cached_prefill: Annotated[float, Field(ge=0)] | None = None
    """Price of prompt tokens in the service's cache; null for the price `prefill`."""
    sample: Annotated[float, Field(ge=0)] | None = None
    """Price of sampled tokens."""
    train: Annotated[float, Field(ge=0)] | None = None
    """Price of trained tokens."""

    def _check_section(self) -> None:
        missing = [name for name in ("prefill", "sample", "train") if getattr(self, name) is None]
        if missing and missing != ["prefill", "sample", "train"]:
            raise ValueError(f"{missing[0]} is missing: set prefill, sample and train together")
        if missing:
            self.refuse_unused("cached_prefill", fix="set prefill, sample and train too")


class ServiceConfig(Section):
    """The Tinker service that runs the model. With neither a credential nor a URL, rlkit starts its embedded engine."""

    base_url: str | None = None
    """URL of a Tinker service; null for TINKER_BASE_URL, then the hosted service if there is a credential, then the
    engine."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Time limit in seconds for one reply, and for a service that does not respond. The run then saves and ends."""
    connect_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Time limit in seconds for opening the first session, with retries. A minute is enough for a restart of the
    service, and short enough to report a wrong address soon."""
    engine_threads: Positive | None = None
    """CPU threads of the embedded engine; null for one per core, or one for a small model."""
    engine_device: Literal["cpu", "cuda"] | None = None
    """Device of the embedded engine; null for the GPU if available."""

    def _check_section(self) -> None:
        if self.base_url is not None:
            fix = "the embedded engine is not used with a base_url"
            self.refuse_unused("engine_threads", "engine_device", fix=fix)


class ChatConfig(Section):
    """Conversion of conversations to tokens."""

    renderer: str | None = None
    """Renderer of tinker-cookbook, or `chat_template` for the tokenizer's template; null for the model's default."""
    tokenizer: str | None = None
    """Source of the tokenizer: a folder with a tokenizer.json, or a name on the hub. Null for the model's tokenizer,
    which needs no download if an installed package contains it."""
