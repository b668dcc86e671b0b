"""The sections that say where the model runs, what a run keeps, what it costs, and when it has done enough.

Invariant: as for the whole schema; a default that switches something off says so.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlkit._util.sections import Positive, Section


class CheckpointConfig(Section):
    """When the weights are saved. The last step always is."""

    every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints; 0 saves only the last."""
    ttl_days: Annotated[float, Field(ge=1 / 24, le=3650)] | None = 30.0
    """Days until the service deletes a checkpoint, since storage is billed; null keeps them."""
    keep_last: Positive | None = None
    """Newest checkpoints that are kept while the run goes on; older ones are deleted on the service, with no way back.
    Null deletes none."""
    keep_best: Annotated[int, Field(ge=0)] = 1
    """With `keep_last`: checkpoints that are kept besides, as the best by `best.metric`."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if self.keep_last is None:
            self.refuse_unused("keep_best", fix="set keep_last, without which no checkpoint is deleted")
        return self


class BestConfig(Section):
    """Which weights are the best, and when training ends early."""

    metric: str | None = None
    """What they are compared by, as it stands in `metrics.jsonl`; null for `eval/all/reward/mean` if something is
    evaluated. Steps that are evaluated are saved too, so that the best weights are kept."""
    lower: bool = False
    """Less of it is better."""
    patience: Positive | None = None
    """Values in a row that are no better, after which training ends; null trains on."""
    min_gain: Annotated[float, Field(ge=0)] = 0.0
    """With `patience`: by how much a value must be better than the best before to count."""
    goal: float | None = None
    """The value at which training ends; null trains on."""

    @model_validator(mode="after")
    def _is_used(self) -> Self:
        if self.patience is None:
            self.refuse_unused("min_gain", fix="set patience")
        return self


class PricesConfig(Section):
    """US dollars for a million tokens; all null for those of the table that comes with rlkit."""

    prefill: Annotated[float, Field(ge=0)] | None = None
    """Of prompts."""
    cached: Annotated[float, Field(ge=0)] | None = None
    """Of prompts that the service had computed before; null for the price of any other."""
    sample: Annotated[float, Field(ge=0)] | None = None
    """Of tokens that are sampled."""
    train: Annotated[float, Field(ge=0)] | None = None
    """Of tokens that are trained on."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        missing = [name for name in ("prefill", "sample", "train") if getattr(self, name) is None]
        if missing and missing != ["prefill", "sample", "train"]:
            raise ValueError(f"{missing[0]} is missing: set prefill, sample and train together")
        if missing:
            self.refuse_unused("cached", fix="set prefill, sample and train too")
        return self


class ServiceConfig(Section):
    """Where the model runs. With neither a credential nor a URL, rlkit starts its own engine."""

    base_url: str | None = None
    """A Tinker service; null takes TINKER_BASE_URL, or the hosted service if there is a credential, or the engine."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that the service may be silent, or take for one answer, before the run saves what it can and ends."""
    connect_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to keep trying before there is a session. A minute outlasts a restart of the service; a wrong address is
    reported while somebody still looks."""
    engine_threads: Positive | None = None
    """CPU threads of the embedded engine; null takes one for each core."""
    engine_device: Literal["cpu", "cuda"] | None = None
    """Where the embedded engine computes; null takes the GPU if there is one."""

    @model_validator(mode="after")
    def _is_one_service(self) -> Self:
        if self.base_url is not None:
            fix = "with a base_url the embedded engine is not started"
            self.refuse_unused("engine_threads", "engine_device", fix=fix)
        return self


class ChatConfig(Section):
    """How conversations become tokens."""

    renderer: str | None = None
    """A renderer of tinker-cookbook, or `chat_template` for the tokenizer's own; null for the model's own."""
    tokenizer: str | None = None
    """A folder with a tokenizer.json, or a model's name on the hub, to take the tokenizer from; null for the model's
    own, which is found without the hub where a package carries it."""
