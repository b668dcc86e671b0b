"""The data that flows through rlkit: frozen dataclasses over numpy arrays.

Invariant: a turn stores exactly the tokens that the sampler received and returned. Training data is made from these
arrays only; text is for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, NamedTuple, NotRequired, Required, TypedDict, cast

import numpy as np
from numpy.typing import NDArray

type Tokens = NDArray[np.int32]
type Floats = NDArray[np.float32]
type Bools = NDArray[np.bool_]
type Json = bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None

IMAGE_TOKEN = -1
"""Placeholder in a token array for each position of an image."""


class TextPart(TypedDict):
    """Text in a message."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image in a message: a URL, a data URI or a path that the renderer can open."""

    type: Literal["image"]
    image: str


class ToolCall(TypedDict):
    """A parsed tool call of the model."""

    id: str
    name: str
    arguments: Mapping[str, Json]


class Tool(TypedDict):
    """A tool that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Json]


class Message(TypedDict, total=False):
    """A message of a conversation, in the shape of the chat APIs."""

    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: Required[str | list[TextPart | ImagePart]]
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    weight: NotRequired[float]  # of its tokens in the loss, in a conversation to train on; 1 by default


@dataclass(frozen=True, slots=True)
class Image:
    """An encoded image in a prompt."""

    start: int  # index of the first of its positions in the prompt's token array
    length: int  # number of its positions, each holding `IMAGE_TOKEN`
    data: bytes  # the encoded file
    format: Literal["png", "jpeg"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The model's input: `tokens [P] int32`, with `IMAGE_TOKEN` at the positions of images."""

    tokens: Tokens
    images: tuple[Image, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def starts_with(self, head: Prompt) -> bool:
        """Return whether this prompt begins with `head`, token for token and image for image."""
        count = len(head)
        return (
            len(self.tokens) >= count
            and not np.count_nonzero(self.tokens[:count] != head.tokens)
            and (self.images == head.images or tuple(i for i in self.images if i.start < count) == head.images)
        )

    def drop_first(self, count: int) -> Prompt:
        """Return the prompt without its first `count` positions, which must not end inside an image."""
        images = [replace(image, start=image.start - count) for image in self.images if image.start >= count]
        # A copy: a view would keep the whole prompt in memory, turn after turn.
        return Prompt(self.tokens[count:].copy(), tuple(images))

    def __add__(self, tail: Prompt) -> Prompt:
        return join([self, tail])


def join(prompts: Sequence[Prompt]) -> Prompt:
    """Join prompts, copying each once."""
    tokens = np.concatenate([prompt.tokens for prompt in prompts]) if prompts else np.empty(0, np.int32)
    if not any([prompt.images for prompt in prompts]):  # noqa: C419  a list, which is faster than a generator for two
        return Prompt(tokens)
    images, start = list[Image](), 0
    for prompt in prompts:
        images += [replace(image, start=image.start + start) for image in prompt.images]
        start += len(prompt)
    return Prompt(tokens, tuple(images))


def as_prompt(tokens: Prompt | Sequence[int] | Tokens) -> Prompt:
    """Return token ids as a `Prompt`."""
    return tokens if isinstance(tokens, Prompt) else Prompt(np.asarray(tokens, dtype=np.int32))


class TokenPiece(NamedTuple):
    """The bytes of a token's text; a special token, such as an end of turn, has its name as text."""

    data: bytes
    is_special: bool


type StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A request to the model and its completion, exactly as sampled.

    Args:
        prompt: [P] the tokens that follow the parent's prompt and completion; without a parent, the whole prompt. An
            episode's memory thus grows with its tokens, not with turns times tokens.
        completion: [C] int32, forced and sampled tokens, the stop token included.
        logprobs: [C] float32, the sampler's log-probability of each token; 0 if forced, NaN if demonstrated.
        sampled_mask: [C] bool, False for forced tokens, which must never get an advantage.
        stop: "stop" at a stop token or string, "length" at the limit `max_tokens`.
        version: number of steps trained into the weights that sampled it.
        parent: index, in the episode, of the turn that this turn extends token for token; None starts a new segment.
        reward: reward of this turn alone, or weight of a demonstrated turn; None if the environment gives none.
        seconds: time from the request to the completion.
        request_id: the service's id of the request, if any.
        messages: for people: messages of the conversation after those of the parent, the reply included; empty after
            `sample`. Image n of the prompt is `#n`.
        role: role that it was played in, see `Policy.role`; None for the policy itself.
        frozen: an opponent's weights sampled it (`Policy.opponent`), so `sampled_mask` is False and nothing is trained.
    """

    prompt: Prompt
    completion: Tokens
    logprobs: Floats
    sampled_mask: Bools
    stop: StopReason
    version: int
    parent: int | None = None
    reward: float | None = None
    seconds: float = 0.0
    request_id: str | None = None
    messages: tuple[Message, ...] = ()
    role: str | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        if not len(self.completion) == len(self.logprobs) == len(self.sampled_mask):
            raise ValueError(
                f"a turn's arrays differ in length: {len(self.completion)} tokens, {len(self.logprobs)} "
                f"log-probabilities, {len(self.sampled_mask)} flags"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A completion, parsed.

    Args:
        text: the reply without thinking and tool calls.
        message: the whole reply; append it to the conversation unchanged.
        turn: the record of the completion.
        tokens: prompt and completion; a prompt of `sample` that begins with them extends this turn.
        malformed_tool_calls: texts of tool calls that could not be parsed.
        stop_text: the stop string of `chat` that ended the reply.
    """

    text: str
    message: Message
    turn: Turn
    tokens: Prompt
    malformed_tool_calls: tuple[str, ...] = ()
    stop_text: str | None = None

    @property
    def thinking(self) -> str:
        """The model's reasoning, or an empty string."""
        return self.message.get("thinking", "")

    @property
    def tool_calls(self) -> Sequence[ToolCall]:
        """Parsed tool calls."""
        return self.message.get("tool_calls", [])

    @property
    def truncated(self) -> bool:
        """True if the reply ended at `max_tokens`."""
        return self.turn.stop == "length"


type Status = Literal["completed", "truncated", "failed"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of `Env.rollout`; a bare number stands for `Outcome(number)`.

    Args:
        reward: the episode's reward, a finite number; by default the mean of `rewards`.
        metrics: numbers to average over episodes, such as `{"correct": 1.0}`.
        info: anything for people, recorded as JSON of at most 1 MiB: messages, the parsed answer, paths of artefacts.
            Objects that JSON cannot hold are recorded by their `repr`.
        truncated: a limit cut the episode short; its reward still counts.
        masked: exclude the episode's tokens from training; its reward still counts in the statistics of its group.
        rewards: reward of each role that had a turn (`Policy.role`); without any, all roles share `reward`.
    """

    reward: float = None  # pyright: ignore[reportAssignmentType]  a number from `__post_init__` on
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    truncated: bool = False
    masked: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.rewards and cast("float | None", self.reward) is None:
            with suppress(AttributeError, TypeError):  # wrong rewards are named when the rollout returns them
                object.__setattr__(self, "reward", fmean(self.rewards.values()))


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """The record of one rollout.

    Args:
        member: index of the rollout in its group, 0 … G−1.
        attempt: number of earlier attempts of this member, all of which failed.
        turns: completions in the order of their requests.
        status: a `failed` episode has no reward and takes no part in the statistics of its group.
        reward: None exactly when `failed`.
        error: reason of the failure in one line.
        masked: its tokens are excluded from training; its reward counts in the statistics of its group.
        group_scored: `GroupScorer.score_group` gave its reward.
        rewards: reward of each role; empty if all roles share `reward`.
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
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if (self.reward is None) != (self.status == "failed"):
            raise ValueError(f"a {self.status} episode cannot have the reward {self.reward}")

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled, over all turns."""
        return sum([int(np.count_nonzero(turn.sampled_mask)) for turn in self.turns])

    def seen_by(self, role: str | None) -> tuple[Episode, list[int]]:
        """Return the episode with the reward and the turns of a role, but no frozen ones, and their indices."""
        places = [place for place, turn in enumerate(self.turns) if turn.role == role and not turn.frozen]
        indices: dict[int | None, int] = {place: index for index, place in enumerate(places)}
        turns = [replace(self.turns[place], parent=indices.get(self.turns[place].parent)) for place in places]
        reward = self.reward if role is None else self.rewards.get(role, self.reward)
        return replace(self, turns=tuple(turns), reward=reward, rewards={}), places

    @property
    def segment_count(self) -> int:
        """Number of turns whose prompt extends no earlier turn token for token (1 for a plain conversation)."""
        return sum(turn.parent is None for turn in self.turns)

    @property
    def fork_count(self) -> int:
        """Number of turns that extend a turn which an earlier turn extends already (0 for a plain conversation)."""
        parents = [turn.parent for turn in self.turns if turn.parent is not None]
        return len(parents) - len(set(parents))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The G episodes of one task, ordered by member.

    Args:
        env: name of the environment in the run.
        task: id of the task.
        draw: position in the order of drawing: the number of groups that the run drew before this one.
    """

    env: str
    task: str
    draw: int
    episodes: tuple[Episode, ...]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """Rewards, [G] float64, NaN for failed episodes."""
        return np.array([np.nan if e.reward is None else e.reward for e in self.episodes], dtype=np.float64)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled, over all episodes."""
        return sum(episode.sampled_tokens for episode in self.episodes)

    @property
    def valid_mask(self) -> Bools:
        """Mask of the episodes that did not fail, [G] bool."""
        return np.array([e.reward is not None for e in self.episodes], dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """A training sequence, aligned for next-token prediction: position t predicts `targets[t]`.

    Args:
        prompt: the input, N positions.
        targets: [N] int32.
        logprobs: [N] float32, the sampler's log-probabilities; 0 for targets that were not sampled.
        advantages: [N] float32, 0 for targets that were not sampled.
        mask: [N] bool, True for targets that the model sampled.
        top: K likeliest tokens of teachers in each place, their log-probabilities, and weights; each [N, K], or None.
    """

    prompt: Prompt
    targets: Tokens
    logprobs: Floats
    advantages: Floats
    mask: Bools
    top: tuple[Tokens, Floats, Floats] | None = None


@dataclass(frozen=True, slots=True)
class BudgetForcing:
    """Budget forcing: if thinking reaches its token limit, append a phrase and sample the answer."""

    phrase: str  # text that asks the model to answer now
    context_tokens: int  # limit of the prompt, the thinking, the phrase and the answer together
    spare_tokens: int = 50  # tokens of that limit to leave unused


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of the sampler."""

    max_tokens: int  # limit of the sampled tokens of a turn
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # probability mass of the nucleus; 1 keeps all tokens
    top_k: int = -1  # number of likeliest tokens to keep; -1 keeps all
    stop: tuple[str, ...] | tuple[int, ...] | None = None  # strings or tokens that end a turn; None for the model's own
    forcing: BudgetForcing | None = None  # budget forcing of chat replies; None leaves long replies truncated


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """A completion of a sampler: `tokens [C] int32`, `logprobs [C] float32`."""

    tokens: Tokens
    logprobs: Floats
    stop: StopReason
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights that a run saved on the service.

    Args:
        step: number of steps trained into the weights.
        state: `tinker://` path of the training state, optimiser included.
        sampler: `tinker://` path of the weights for sampling.
        expires: time of deletion in seconds since the epoch; None for never.
    """

    step: int
    state: str
    sampler: str
    expires: float | None = None
