"""The data that flows through rlkit: frozen, over numpy arrays, never changed after it is made.

Invariant: what a turn stores is exactly what the sampler was given and gave back. Text is for people; training data is
made from these arrays only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NotRequired, Required, TypedDict

import numpy as np
from numpy.typing import NDArray

type Tokens = NDArray[np.int32]
type Floats = NDArray[np.float32]
type Bools = NDArray[np.bool_]
type Json = bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None

IMAGE_TOKEN = -1
"""Stands in a token array for each position that an image takes up."""


class TextPart(TypedDict):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image in a message: a URL, a data URI or a path that the renderer can open."""

    type: Literal["image"]
    image: str


class ToolCall(TypedDict):
    """A call that the model asked for, already parsed."""

    id: str
    name: str
    arguments: Mapping[str, Json]


class Tool(TypedDict):
    """A tool that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Json]


class Message(TypedDict, total=False):
    """One message of a conversation, in the shape of the chat APIs."""

    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: Required[str | list[TextPart | ImagePart]]
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image inside a prompt.

    Args:
        start: index of its first position in the token array that it belongs to.
        length: how many positions it takes up, each holding `IMAGE_TOKEN`.
        data: the encoded file.
        format: the encoding of `data`.
    """

    start: int
    length: int
    data: bytes
    format: Literal["png", "jpeg"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the model is given: `tokens [P] int32`, with `IMAGE_TOKEN` where an image stands."""

    tokens: Tokens
    images: tuple[Image, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def starts_with(self, head: Prompt) -> bool:
        """Whether this prompt continues `head`, token for token and image for image."""
        count = len(head)
        return (
            len(self.tokens) >= count
            and bool((self.tokens[:count] == head.tokens).all())
            and (self.images == head.images or tuple(i for i in self.images if i.start < count) == head.images)
        )

    def after(self, count: int) -> Prompt:
        """What follows the first `count` positions, which must not cut an image in two."""
        images = tuple(
            Image(image.start - count, image.length, image.data, image.format)
            for image in self.images
            if image.start >= count
        )
        # A copy: a view would keep the whole prompt in memory, turn after turn.
        return Prompt(self.tokens[count:].copy(), images)

    def __add__(self, tail: Prompt) -> Prompt:
        return join([self, tail])


_NO_TOKENS = np.empty(0, np.int32)


def join(prompts: Sequence[Prompt]) -> Prompt:
    """Prompts one after another, copied once."""
    tokens = np.concatenate([_NO_TOKENS, *[prompt.tokens for prompt in prompts]])
    if not any([prompt.images for prompt in prompts]):  # noqa: C419  a list, which is faster than a generator for two
        return Prompt(tokens)
    images, start = list[Image](), 0
    for prompt in prompts:
        for image in prompt.images:
            images.append(Image(image.start + start, image.length, image.data, image.format))
        start += len(prompt)
    return Prompt(tokens, tuple(images))


def as_prompt(tokens: Prompt | Sequence[int] | Tokens) -> Prompt:
    """A `Prompt` from plain token ids."""
    return tokens if isinstance(tokens, Prompt) else Prompt(np.asarray(tokens, dtype=np.int32))


type StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One completion, exactly as it was sampled.

    Args:
        prompt: [P] the prompt tokens that this turn added to its parent's prompt and completion (all of them without a
            parent), so that an episode's memory grows with its tokens and not with turns times tokens.
        completion: [C] int32, forced and sampled tokens, the stop token included.
        logprobs: [C] float32, the sampler's log-probability of each token; 0 where it was forced.
        sampled: [C] bool, False where the token was forced and must never get an advantage.
        stop: "stop" at a stop token or string, "length" when `max_tokens` cut it off.
        version: optimiser steps taken by the weights that sampled it.
        parent: index, in the episode, of the turn whose tokens this one extends; None starts a new segment.
        reward: the reward of this turn alone, where the environment gives one.
        seconds: from the request to the answer.
        request_id: the service's id of the request, where it gives one.
    """

    prompt: Prompt
    completion: Tokens
    logprobs: Floats
    sampled: Bools
    stop: StopReason
    version: int
    parent: int | None = None
    reward: float | None = None
    seconds: float = 0.0
    request_id: str | None = None

    def __post_init__(self) -> None:
        if not len(self.completion) == len(self.logprobs) == len(self.sampled):
            raise ValueError(
                f"a turn's arrays differ in length: {len(self.completion)} tokens, {len(self.logprobs)} "
                f"log-probabilities, {len(self.sampled)} flags"
            )


type Status = Literal["completed", "truncated", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `Env.rollout` returns; a bare number stands for `Outcome(number)`.

    Args:
        reward: the episode's reward, a finite number.
        metrics: numbers to average over episodes, such as `{"correct": 1.0}`.
        info: anything for people: messages, the parsed answer, paths of artefacts. It is recorded as JSON, and what
            JSON does not have as its `repr`; at most 1 MiB of it.
        truncated: the episode was cut short by a limit; its reward still counts.
        masked: none of its tokens is trained on; its reward still counts in the statistics of its group.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    truncated: bool = False
    masked: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One rollout of one task.

    Args:
        member: place in the group, 0 … G−1.
        attempt: how many attempts at this place failed before this one.
        turns: every completion that it asked for, in order.
        status: `failed` episodes have no reward and take no part in their group's statistics.
        reward: None exactly when `failed`.
        error: one line that says why it failed.
        masked: its reward counts in the statistics of its group, and no token of it is trained on.
        group_scored: its reward is the one that the comparison with the other episodes of its group gave.
    """

    member: int
    attempt: int
    turns: tuple[Turn, ...]
    status: Status
    reward: float | None
    metrics: Mapping[str, float]
    info: Mapping[str, Json]
    seconds: float
    error: str | None = None
    masked: bool = False
    group_scored: bool = False

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.status == "failed"):
            raise ValueError(f"a {self.status} episode cannot have the reward {self.reward}")

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the model sampled, over all turns."""
        return sum(int(np.count_nonzero(turn.sampled)) for turn in self.turns)

    @property
    def segments(self) -> int:
        """How many times a prompt did not extend the exact tokens of an earlier turn (1 for a plain conversation)."""
        return sum(turn.parent is None for turn in self.turns)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The G episodes of one task, ordered by member.

    Args:
        env: name of the environment in the run.
        task: the task's own id, where its env has one.
        draw: how many groups were drawn before it in the run.
    """

    env: str
    task: str
    draw: int
    episodes: tuple[Episode, ...]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[G] float64, NaN where the episode failed."""
        return np.array([np.nan if e.reward is None else e.reward for e in self.episodes], dtype=np.float64)

    @property
    def valid(self) -> Bools:
        """[G] bool, False where the episode failed."""
        return np.array([e.reward is not None for e in self.episodes], dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """One training sequence, aligned for next-token prediction: position t predicts `targets[t]`.

    Args:
        prompt: the input, N positions.
        targets: [N] int32.
        logprobs: [N] float32, the sampler's, 0 where no token was sampled.
        advantages: [N] float32, 0 everywhere that the model did not choose the token.
        mask: [N] bool, True where the target was sampled by the model.
    """

    prompt: Prompt
    targets: Tokens
    logprobs: Floats
    advantages: Floats
    mask: Bools


@dataclass(frozen=True, slots=True)
class BudgetForcing:
    """What becomes of a reply whose tokens are used up before its end: it is told so, and the answer is sampled.

    Args:
        phrase: that it is told with.
        context_tokens: of the prompt, the thinking, the phrase and the answer together.
        spare_tokens: of these that are left alone.
    """

    phrase: str
    context_tokens: int
    spare_tokens: int = 50


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn.

    Args:
        max_tokens: at most this many sampled tokens a turn.
        temperature: 0 is greedy.
        top_p: nucleus; 1 keeps all tokens.
        top_k: keep the k likeliest; -1 keeps all.
        stop: strings or token ids that end a turn; None for the model's own end of turn.
        forcing: of the replies of conversations; None leaves them cut off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    forcing: BudgetForcing | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What a sampler gives back for one sample: `tokens [C] int32`, `logprobs [C] float32`."""

    tokens: Tokens
    logprobs: Floats
    stop: StopReason
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights that the service keeps.

    Args:
        step: optimiser steps that they have taken.
        state: `tinker://` path of the training state, optimiser included.
        sampler: `tinker://` path of the weights for sampling.
        expires: seconds since the epoch, None for never.
    """

    step: int
    state: str
    sampler: str
    expires: float | None = None
