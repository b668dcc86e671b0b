"""A model of a service, with all that a policy outside a run needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlkit._util.threads import in_thread
from rlkit.chat.format import ChatFormat
from rlkit.policy import Limits, Sampler
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.service import Service
from rlkit.types import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model, or a checkpoint of it; policies share its sampler."""

    name: str  # name of the model
    sampler: Sampler
    chat: ChatFormat
    context_tokens: int | None

    def make_policy(
        self, sampling: Sampling, *, seed: Callable[[int], int], context_tokens: int | None = None
    ) -> RecordingPolicy:
        """Return a policy of one rollout; `seed` as of `RecordingPolicy`, `context_tokens` limits it further."""
        contexts = [tokens for tokens in (self.context_tokens, context_tokens) if tokens is not None]
        limits = Limits(context_tokens=min(contexts, default=None))
        return RecordingPolicy(
            sampler=lambda: self.sampler, chat=self.chat, sampling=sampling, seed=seed, limits=limits
        )


async def open_model(
    service: Service,
    name: str,
    *,
    checkpoint: str | None = None,
    chat: ChatFormat | None = None,
    renderer: str | None = None,
    with_weights: bool,
    note: Callable[[str], None] = lambda message: None,
) -> ServedModel:
    """Return a model by its name or by the `tinker://` path of a checkpoint.

    Args:
        checkpoint: path of sampler weights of the model; None for those in `name`.
        chat: format of its conversations; None for that of `renderer`.
        renderer, with_weights, note: as of `chat_format` and `load_tokenizer`.
    """
    from rlkit.chat.renderers import chat_format
    from rlkit.tokenizers.load import load_tokenizer

    is_path = name.startswith("tinker://")
    model = await service.model_of(name) if is_path else name
    if chat is None:
        tokenizer = await in_thread(lambda: load_tokenizer(model, with_weights=with_weights, note=note))
        chat = await in_thread(lambda: chat_format(model, tokenizer, renderer=renderer))
    sampler = await service.sampler(model=model, checkpoint=checkpoint or (name if is_path else None))
    return ServedModel(model, sampler, chat, await service.context_tokens(model))
