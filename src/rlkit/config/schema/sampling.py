"""The sections `sampling` and `rollouts`."""

from __future__ import annotations

from typing import Annotated, Literal, override

from pydantic import Field, GetJsonSchemaHandler, ValidatorFunctionWrapHandler, WrapValidator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from rlkit._util.sections import Positive, Probability, Section


class BudgetForcingConfig(Section):
    """Forced answer for a turn that used up `max_tokens` by thinking."""

    context_window_tokens: Positive
    """Tokens of prompt, thinking and answer together; the answer can use the remainder."""
    phrase: str = "\n\n... okay, I am out of thinking tokens. I need to send my final message now."
    """Text that ends the thinking, from TTT-Discover. This text and the tokens that open the answer are not trained
    on."""


class SamplingConfig(Section):
    """Sampling of completions in training."""

    max_tokens: Positive = 256
    """Maximum tokens of a completion. Small, because the longest rollout of a batch determines the time of a step."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature. 1 samples from the trained policy, as the policy gradient assumes."""
    top_p: Probability = 1.0
    """Probability mass of nucleus sampling. 1 is off, because a lower value does not sample from the trained policy."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Number of most likely tokens to sample from; -1 for all, for the same reason as `top_p`."""
    stop: list[str] | None = None
    """Strings that end a completion; null for the model's end-of-turn token."""
    budget_forcing: BudgetForcingConfig | None = None
    """Forced answer for a turn that used up `max_tokens`; null truncates the turn, as most environments expect."""


def _validate_count(value: object, validate: ValidatorFunctionWrapHandler) -> int | Literal["auto"]:
    try:
        return validate(value)
    except ValueError:
        raise PydanticCustomError("count", "an integer of at least 0, or auto") from None


class WorkersConfig(Section):
    """Processes that run the code of environments; a number or `auto` is short for `count`."""

    runner: Literal["local", "ray"] = "local"
    """`local` for processes on this machine; `ray` for actors on a Ray cluster. The cluster is that of `ray.init()`,
    else of RAY_ADDRESS, else a new local cluster."""
    count: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], WrapValidator(_validate_count)] = "auto"
    """Number of processes. 0 plays rollouts in the process of the run, which suits environments that mostly wait for
    the model. `auto` is the number of processors of this machine or of the cluster, divided by `cpus`."""
    cpus: Positive = 1
    """Processors of a process. Ray reserves them, and numerical libraries use this number of threads."""
    memory_mb: Positive | None = None
    """Resident memory in MiB at which a process is replaced. The memory of its child processes does not count. Null for
    an equal share of 90 % of this machine's memory; on a Ray cluster, null lets Ray decide."""

    def _check_section(self) -> None:
        if not self:
            fix = "remove it, or set count; 0 plays in the run's own process"
            self.refuse_unused("runner", "cpus", "memory_mb", fix=fix)

    @classmethod
    @override
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        return {"anyOf": [handler(core_schema), {"type": "integer", "minimum": 0}, {"const": "auto", "type": "string"}]}

    def __bool__(self) -> bool:
        """Return whether environments run in other processes than the run."""
        return self.count != 0


class RolloutsConfig(Section):
    """Limits, retries and requests of rollouts."""

    workers: WorkersConfig = WorkersConfig(count=0)
    """Processes that run the code of environments, for environments that compute, block or crash."""

    max_concurrent: Positive = 256
    """Maximum concurrent rollouts. The Tinker service queues excess requests, so more is rarely faster."""
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0
    """Time limit of a rollout in seconds, after which the rollout fails; service outages do not count."""
    max_retries: Annotated[int, Field(ge=0)] = 2
    """Maximum retries of failed episodes in a group. Afterwards the group continues with its valid episodes."""
    min_valid: Positive = 2
    """Minimum episodes with a reward in a group; a group with fewer is dropped and replaced. Two are the minimum for a
    comparison; a group of size 1 needs one."""
    coalesce: Literal["single_turn", "always", "never"] = "single_turn"
    """Which groups send their first turns as one request. One request computes the prompt only once. Its replies arrive
    together, so a multi-turn rollout would wait for the longest reply."""
    endpoint_host: Annotated[str, Field(min_length=1)] | None = None
    """Name or address of this machine, as seen by agents in containers and on other machines. These agents call the
    model at the endpoint of their rollout. The endpoint then listens on all interfaces; null for this machine only."""
