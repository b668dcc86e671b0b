"""Check that a service supports a run, before its first rollout.

Invariant: weights do not change, and the checkpoint that is saved is deleted or expires within an hour.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from rlkit.algorithms.losses import CrossEntropy, Distillation, LocalLoss, Loss
from rlkit.config.schema import Config
from rlkit.errors import RlkitError, UsageError
from rlkit.service import Learner, Service
from rlkit.types import Datum, Prompt

_TTL_S = 3600


async def check_support(config: Config, service: Service, learner: Learner, loss: Loss) -> None:
    """Compute each loss of a token, save a checkpoint, and score a token for a run with a penalty or teachers.

    The embedded engine supports every run, so it is not asked.

    Raises:
        UsageError: the service lacks one of them.
        ServiceError: the service failed after retries.
    """
    if service.is_repeatable:
        return
    losses = [loss, CrossEntropy()] if len(config.reinforced_envs) < len(config.envs) else [loss]
    has_references = config.kl_penalty.coefficient or any(map(config.find_teachers, (*config.envs, *config.eval.envs)))
    prompt, zeros = Prompt(np.array([65], np.int32)), np.zeros(1, np.float32)
    datum = Datum(prompt, np.array([66], np.int32), zeros, zeros, np.ones(1, bool))
    need = ""
    try:
        for each in losses:
            need = f"the loss {each.name!r}"
            await learner.forward([datum], CrossEntropy() if isinstance(each, LocalLoss) else each)
        if has_references:
            need = "log-probabilities of prompts, for the KL penalty or a teacher"
            compute_score = await service.scorer(model=config.model)
            await compute_score(Prompt(np.array([65, 66], np.int32)), 1, 0)
            if isinstance(loss, Distillation):
                need = f"the likeliest tokens of prompts, or several targets: loss.top_tokens {loss.top_tokens}"
                scores = await compute_score(Prompt(np.array([65, 66], np.int32)), 1, loss.top_tokens)
                top = scores.top_tokens, scores.top_logprobs, np.zeros_like(scores.top_logprobs)
                await learner.gradient([replace(datum, top=top)], loss)
        need = "saving checkpoints"
        paths = await learner.save("rlkit-check", ttl_s=_TTL_S)
    except UsageError as error:
        raise UsageError(
            f"the service lacks {need}, which this run needs: {error}. Change the run, or use another service; "
            "`rlkit check service` lists what a service supports"
        ) from error
    for path in paths:
        with suppress(RlkitError):  # it expires
            await service.delete(path)
