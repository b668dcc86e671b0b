"""The sections of supervised steps: the conversations to train on, and their steps before reinforcement."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from rlkit._util.sections import Positive, Section
from rlkit.config.schema.envs import EnvConfig

DEMONSTRATIONS = "demonstrations"
"""Name of the built-in environment of conversations."""

_COMPARISONS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq}


def parse_condition(text: str) -> Callable[[float], bool]:
    """Return the test of a reward that a condition describes, such as `>= 1`; raise ValueError if it is none."""
    match = re.fullmatch(r"\s*(>=|<=|==|>|<)(.+)", text)
    with suppress(ValueError):
        if match is not None and math.isfinite(limit := float(match[2])):
            return lambda reward: _COMPARISONS[match[1]](reward, limit)
    raise ValueError(f"{text!r} is not a condition such as '>= 1'")


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


class SourceConfig(Section):
    """Conversations to train on with the loss `cross_entropy`, without rollouts. They come from files, or from the
    episodes of a run. A conversation counts as a group, so a step trains on `batch.groups` conversations."""

    files: Annotated[
        Annotated[list[str], Field(min_length=1)] | None,
        BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
    ] = None
    """File or list of files of JSON lines. A line has `messages`, and optionally `tools`, in the format of OpenAI's
    chat API. A message may have `thinking`. The `weight` of a message multiplies the loss of its
    tokens; with `weight: 0`, it is not trained on."""
    run: str | None = None
    """Name or directory of a run. Its episodes are trained on token for token, so its tokenizer must be that of the
    model."""
    reward: Annotated[str, AfterValidator(lambda text: parse_condition(text) and text)] | None = None
    """With `run`: condition on the reward of an episode, such as `>= 1`; null for all episodes."""
    newest: Positive | None = None
    """With `run`: number of newest episodes to train on; null for all."""
    roles: Annotated[tuple[Literal["assistant", "user", "system", "tool"], ...], Field(min_length=1)] = ("assistant",)
    """With `files`: roles of the messages to train on. Only `assistant`, because the model never writes other roles."""

    def _check_section(self) -> None:
        if (self.files is None) == (self.run is None):
            raise ValueError("set either files or run")
        if self.run is None:
            self.refuse_unused("reward", "newest", fix="set run instead of files")
        else:
            self.refuse_unused("roles", fix="the episodes of a run have the tokens that it trained on")

    def as_env(self) -> EnvConfig:
        """Return the environment of these conversations."""
        args = self.model_dump(mode="json", include=set(SourceConfig.model_fields), exclude_defaults=True)
        return EnvConfig(env=DEMONSTRATIONS, args=args, group_size=1)


class WarmStartConfig(SourceConfig):
    """Supervised steps before reinforcement, in addition to `steps`. The learning-rate schedule restarts after them."""

    steps: Positive = 50
    """Number of supervised steps."""
    learning_rate: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Learning rate of these steps; null for `optimizer.learning_rate`."""
