"""Environments of rlkit in the evaluation frameworks of others.

Invariant: a failed episode is an error of the framework, never a score. A module needs its framework, but neither torch
nor the Tinker SDK, so that it works in a virtual environment with the framework's own pins.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlkit.config.loading.objects import list_envs
from rlkit.env import Env, GroupScorer, read_task_id
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import ChatRequest, SampleRequest
from rlkit.tasks.sources import Tasks
from rlkit.types import Message

MAX_TOKENS = 1 << 20
"""`Policy.max_tokens` where the framework sets no limit: the model's own limit is lower."""


def name_tasks(tasks: Tasks) -> Mapping[str, Env]:
    """Return tasks by `task_id`, after an index if two have the same; UsageError if one scores its group."""
    envs = list_envs(tasks, subject="tasks is")
    if group_scorer := next((env for env in envs if isinstance(env, GroupScorer)), None):
        raise UsageError(f"{type(group_scorer).__name__} scores its episodes as a group: evaluate it with `rlkit eval`")
    ids = [read_task_id(env) or str(index) for index, env in enumerate(envs)]
    if len(set(ids)) < len(ids):
        ids = [f"{index}:{task_id}" for index, task_id in enumerate(ids)]
    return dict(zip(ids, envs, strict=True))


def as_chat(request: SampleRequest | ChatRequest) -> ChatRequest:
    """Return a request as a chat, because frameworks have no completions: a text prompt is a message of the user."""
    if len(request.forced):
        raise EnvironmentFault("an evaluation framework cannot force the start of a reply")
    if isinstance(request, ChatRequest):
        return request
    if not isinstance(request.prompt, str) or request.stop is not None:
        raise EnvironmentFault("an evaluation framework accepts neither tokens nor `stop`: use texts, or `policy.chat`")
    message: Message = {"role": "user", "content": request.prompt}
    return ChatRequest([message], (), (), request.max_tokens, request.temperature, 1, None, role=request.role)
