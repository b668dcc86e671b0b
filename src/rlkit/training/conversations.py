"""Check of the conversations of a run before its first step.

Invariant: a supervised step trains on its full number of conversations, because none of them fails later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlkit.chat.format import ChatFormat
from rlkit.config.schema import Config
from rlkit.env import Task, TaskSource
from rlkit.errors import UsageError
from rlkit.policy import NoSampler, Samplers
from rlkit.rollout.runner import Rollout, RolloutRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.tasks.sources import Tasks
from rlkit.types import Turn


async def check_conversations(
    config: Config,
    tasks: Mapping[str, Tasks],
    runner: RolloutRunner,
    settings: Mapping[str, EnvSettings],
    chat: ChatFormat,
    *,
    note: Callable[[str], None],
) -> None:
    """Record all conversations once; note whether the chat format drops their thinking.

    Raises:
        UsageError: a conversation does not fit the context, `batch.max_tokens` or the chat format.
    """
    limit = config.batch.max_tokens
    for name, envs in tasks.items():
        if name in config.reinforced_envs or isinstance(envs, TaskSource):
            continue
        conversations = [Task(draw, name, env) for draw, env in enumerate(envs)]
        field, errors, thoughtless = config.find_field(name), list[str](), 0
        note(f"{field}: checking {len(conversations)} conversations")
        for task in conversations:
            rollout = Rollout(task.draw, settings[name], 0, 0, 0, "check")
            episode = await runner.play(task, rollout, Samplers(NoSampler, NoSampler))
            prompt = min((len(turn.prompt) for turn in episode.turns if turn.parent is None), default=0)
            problem = episode.error or ("" if episode.sampled_tokens else "it has no token to train on")
            if not problem and limit is not None and prompt >= limit:
                problem = f"its prompt of {prompt} tokens leaves nothing of batch.max_tokens = {limit}"
            errors += [f"{task.id}: {problem}"] if problem else []
            thoughtless += any(_drops_thinking(turn, chat) for turn in episode.turns)
        if errors:
            count = f"{len(errors)} of {len(conversations)} conversations cannot be trained on"
            raise UsageError(f"{field}: {count}; remove or shorten them. The first is {errors[0]}")
        if thoughtless:
            count = f"{thoughtless} of {len(conversations)} conversations"
            note(f"{field}: the chat format drops the thinking of {count}; another chat.renderer may keep it")


def _drops_thinking(turn: Turn, chat: ChatFormat) -> bool:
    """Return whether the tokens of a turn lack the thinking of its reply; line breaks and spaces may differ."""
    thinking = turn.messages[-1].get("thinking", "").split() if turn.messages else []
    return "".join(thinking) not in "".join(chat.decode(turn.completion).split())
