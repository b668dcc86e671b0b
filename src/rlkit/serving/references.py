"""The references of a run, on its service: of the KL penalty, and the teachers of its environments.

Invariant: a teacher has the tokens of the run's model, so each of its log-probabilities is that of the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import cast

from rlkit._util.frames import describe_error
from rlkit._util.json_values import describe_type
from rlkit._util.threads import in_thread
from rlkit.algorithms.datums import keep_first
from rlkit.algorithms.losses import Distillation
from rlkit.algorithms.references import NO_SCORES, Reference, Score, Scores
from rlkit.chat.format import ChatFormat
from rlkit.config.loading.objects import load_function
from rlkit.config.schema import Config
from rlkit.cost.usage import Price
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.service import Service
from rlkit.service.watch import ServiceWatch
from rlkit.tokenizers.equality import check_source_runs, require_equal_tokenizers
from rlkit.types import Message, Prompt

type References = Mapping[str, Sequence[Reference]]
"""References by environment."""

_ROLES = ("system", "user", "assistant", "tool")


async def load_references(
    config: Config, service: Service, watch: ServiceWatch, chat: ChatFormat, *, price: Price | None
) -> References:
    """Load the references of all environments, with retries of their calls; environments of evaluations have teachers.

    Args:
        price: price of the run's model and of its teachers, if it is known.

    Raises:
        UsageError: a checkpoint does not exist, or the tokenizer of a teacher, or of a run whose episodes are trained
            on, is not that of the run's model.
    """
    await in_thread(partial(check_source_runs, config, note=watch.note))
    penalty, kl = list[Reference](), config.kl_penalty
    if kl.coefficient:
        path = None if kl.reference == "base" else kl.reference
        score = await _load_score(service, watch, config.model, path, field="kl_penalty.reference")
        penalty.append(Reference(score, kl.coefficient, kl.discount))
    teachers, references = dict[str, Reference](), dict[str, Sequence[Reference]]()
    for env in (*config.envs, *config.eval.envs):
        terms = [*penalty] if env in config.reinforced_envs else []
        for field, spec in config.find_teachers(env).items():
            if field not in teachers:
                model = spec.model or config.model
                require = partial(require_equal_tokenizers, config, model, field=f"{field}.model", note=watch.note)
                await in_thread(require)
                teachers[field] = Reference(
                    await _load_score(service, watch, model, spec.checkpoint, price, field=field),
                    spec.weight,
                    spec.discount,
                    is_teacher=True,
                    name=field.removeprefix(f"envs.{env}.").removeprefix("teacher").removeprefix("s."),
                    clip=spec.clip or math.inf,
                    top_tokens=config.loss.top_tokens if isinstance(config.loss, Distillation) else 0,
                    # Steps ahead play the first groups after the warm start with weights of its last steps.
                    first_step=1 if spec.first_step <= config.warm_start_steps + 1 else spec.first_step,
                    last_step=spec.last_step,
                    make_context=None if spec.prompt is None else load_context(spec.prompt, chat, f"{field}.prompt"),
                )
            terms.append(teachers[field])
        if terms:
            references[env] = terms
    return references


async def _load_score(
    service: Service, watch: ServiceWatch, model: str, checkpoint: str | None, price: Price | None = None, *, field: str
) -> Score:
    """Return a score function that counts the price of a teacher; its tokens are counted with the run's price.

    Tokens beyond the context of the model are not scored.
    """
    load = partial(service.scorer, model=model, checkpoint=checkpoint)
    try:
        compute_score = await watch.call(load, "loading the reference", retry=True)
    except UsageError as error:
        raise UsageError(f"{field}: {error}") from error
    context = await watch.call(lambda: service.context_tokens(model), "asking for the context", retry=True)
    note_once = cache(watch.note)

    async def score(prompt: Prompt, last: int, top: int) -> Scores:
        if context is not None and len(prompt) >= context:  # the request samples one token more
            note_once(f"{field}: tokens beyond its context of {context:,} tokens have no term in the advantages")
            beginning = keep_first(prompt, context - 1)
            prompt, last = beginning, last - len(prompt) + len(beginning)
        if last <= 0:
            return NO_SCORES
        scores = await watch.call(lambda: compute_score(prompt, last, top), "scoring by the reference", retry=True)
        if price is not None:
            service.usage.other_usd += price.scoring_difference(model, len(prompt), 1)
        return scores

    return score


def load_context(path: str, chat: ChatFormat, field: str) -> Callable[[Sequence[Message]], Prompt]:
    """Return a function from the messages of a prompt to the teacher's prompt, by the user's function at a path."""
    function = load_function(path, field=field, of="messages")

    def make_context(messages: Sequence[Message]) -> Prompt:
        try:
            context: object = function(deepcopy([*messages]))  # it may change them
            if isinstance(context, list) and context and all(map(_is_message, cast("list[object]", context))):
                return chat.render(cast("list[Message]", context))
        except (Exception, SystemExit) as error:  # the user's own code
            raise EnvironmentFault(f"{field}: {path} failed: {describe_error(error)}") from error
        answer = describe_type(cast("object", context))
        problem = "it must return a non-empty list of messages, each a dict with a role and its content"
        raise EnvironmentFault(f"{field}: {path} returned {answer}: {problem}")

    return make_context


def _is_message(value: object) -> bool:
    message = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    return message.get("role") in _ROLES and isinstance(message.get("content"), str | list)
