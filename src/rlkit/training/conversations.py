"""Check of the conversations of a run before its first step.

Invariant: a supervised step trains on its full number of conversations, because none of them fails later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlkit.config.schema import Config
from rlkit.env import Task, TaskSource
from rlkit.errors import UsageError
from rlkit.policy import Samplers
from rlkit.rollout.runner import Rollout, RolloutRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.tasks.sources import Tasks
from rlkit.types import Completion, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class _InitialSampler:
    """Sampler that conversations never use, but for the version of its weights."""

    version: int = 0

    async def sample(
        self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
    ) -> Sequence[Completion]:
        raise NotImplementedError


async def check_conversations(
    config: Config,
    tasks: Mapping[str, Tasks],
    runner: RolloutRunner,
    settings: Mapping[str, EnvSettings],
    *,
    note: Callable[[str], None],
) -> None:
    """Record all conversations once; raise UsageError if one does not fit the context or the chat format."""
    for name in [name for name in config.envs if name not in config.reinforced_envs]:
        envs = tasks[name]
        if isinstance(envs, TaskSource):
            continue
        conversations, errors = [Task(draw, name, env) for draw, env in enumerate(envs)], list[str]()
        note(f"{config.find_field(name)}: checking {len(conversations)} conversations")
        for task in conversations:
            rollout = Rollout(task.draw, settings[name], 0, 0, 0, "check")
            episode = await runner.play(task, rollout, Samplers(_InitialSampler, _InitialSampler))
            error = episode.error
            prompt = min((len(turn.prompt) for turn in episode.turns if turn.parent is None), default=0)
            if (limit := config.batch.max_tokens) is not None and prompt >= limit:
                error = f"its prompt of {prompt} tokens leaves nothing of batch.max_tokens = {limit} to train on"
            if error is not None:
                errors.append(f"{task.id}: {error}")
        if errors:
            count = f"{len(errors)} of {len(conversations)} conversations cannot be trained on"
            raise UsageError(f"{config.find_field(name)}: {count}; remove or shorten them. The first is {errors[0]}")
