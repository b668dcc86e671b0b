"""Harbor tasks: folders with an instruction, an environment and tests, for an agent that works in a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, JsonValue

from rlkit._util.paths import expand_user
from rlkit._util.sections import Positive, validate_fields
from rlkit.envs.harbor.outcome import Reward, Rule, Rules
from rlkit.envs.harbor.phases import PhaseLimits
from rlkit.envs.harbor.tasks import Selection, Split, find_tasks, require_readable
from rlkit.errors import UsageError
from rlkit.types import Json

if TYPE_CHECKING:
    from rlkit.envs.harbor.task import HarborTask

# Set before Harbor is imported, which would otherwise download a price table and send telemetry.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HARBOR_TELEMETRY", "0")

__all__ = ["harbor"]

type Seconds = Annotated[float, Field(gt=0)]
type Fraction = Annotated[float, Field(gt=0, lt=1)]


def harbor(
    *,
    tasks_dir: str | None = None,
    dataset: str | None = None,
    registry: str | None = None,
    file_tasks: dict[str, JsonValue] | None = None,
    task_ids: Sequence[str] = (),
    exclude: Sequence[str] = (),
    split: Split = "all",
    eval_fraction: Fraction | None = None,
    eval_tasks: Sequence[str] = (),
    max_tasks: Positive | None = None,
    shuffle: bool = True,
    seed: int = 0,
    environment: str = "local",
    environment_kwargs: dict[str, JsonValue] | None = None,
    cpus: Positive | None = None,
    memory_mb: Positive | None = None,
    storage_mb: Positive | None = None,
    force_build: bool = False,
    agent: str = "terminus-2",
    max_turns: Positive | None = None,
    parser: Literal["json", "xml"] = "json",
    summarize: bool = False,
    agent_kwargs: dict[str, JsonValue] | None = None,
    agent_env: dict[str, str] | None = None,
    agent_timeout_s: Seconds | None = None,
    verifier_timeout_s: Seconds | None = None,
    timeout_multiplier: Seconds = 1.0,
    reward_key: str | None = None,
    reward_weights: dict[str, float] | None = None,
    on_timeout: Rule = "verify",
    on_overflow: Rule = "verify",
    on_agent_error: Rule = "drop",
    on_environment_error: Rule = "drop",
    max_starting: Positive | None = None,
    max_playing: Positive | None = None,
    max_verifying: Positive | None = None,
    starts_per_s: Seconds | None = None,
    trials_dir: str | None = None,
    keep_trials: Literal["all", "failed", "none"] = "none",
    pin: Callable[[Json], Json] = lambda now: now,
    note: Callable[[str], None] = lambda message: None,
) -> Sequence[HarborTask]:
    """Load Harbor tasks, played with the model that is trained by Terminus 2, a plain shell or an agent of Harbor.

    The tasks come from `tasks_dir`, `dataset` or `file_tasks`. `docs/terminal.md` describes every option.

    Args:
        tasks_dir: a task, a folder of tasks, or a folder of such folders.
        dataset: `name@version` in a registry.
        registry: file or URL, in the format of Harbor or terminal-bench 1; by default the published registry.
        file_tasks: small generated tasks about files: `{variants: 12, held_out: 4, seed: 0}`.
        split: `eval` for the tasks held out for evaluation, `train` for the rest. The two splits never share a task.
        eval_fraction: share of tasks held out for evaluation, by a hash of the task's id; by default a fifth.
        environment: `local`, a Harbor type such as `docker`, or `package.module:Class`.
        agent: `terminus-2`; `shell`, with one command per turn, for small models; or an installed agent of Harbor, such
            as `mini-swe-agent`.
        max_turns: replies of the model in one rollout; by default limited by time and context only.
        agent_env: environment variables of an installed agent.
        agent_timeout_s: time limit of the agent; by default the task's, or half an hour if neither the task nor
            `max_turns` sets a limit.
        reward_key: key of the reward in `reward.json`; by default `reward`, or the only key.
        on_timeout: reward rule (`outcome.Rule`) for an episode whose agent ran out of time.
        pin: returns the commit at the run's start, given the newest commit of a dataset that follows a branch.
        note: called with download progress, and with differences between a task and its terminal-bench 1 original.

    Raises:
        UsageError: a task does not exist, or options contradict each other.
        MissingError: a dataset cannot be downloaded.
    """
    from rlkit.envs.harbor.settings import Agent, TrialSettings, make_environment
    from rlkit.envs.harbor.task import HarborTask

    selection = Selection(
        task_ids=task_ids,
        exclude=exclude,
        split=split,
        eval_fraction=eval_fraction,
        eval_tasks=eval_tasks,
        max_tasks=max_tasks,
        shuffle=shuffle,
        seed=seed,
    )
    settings = TrialSettings(
        environment=make_environment(
            environment,
            environment_kwargs,
            cpus=cpus,
            memory_mb=memory_mb,
            storage_mb=storage_mb,
            force_build=force_build,
        ),
        agent=Agent(agent, max_turns, parser, summarize, agent_kwargs or {}, agent_env or {}),
        agent_timeout_s=agent_timeout_s,
        verifier_timeout_s=verifier_timeout_s,
        timeout_multiplier=timeout_multiplier,
        phases=PhaseLimits(max_starting, max_playing, max_verifying, starts_per_s),
        rules=Rules(on_timeout, on_overflow, on_agent_error, on_environment_error),
        reward=Reward(reward_key, reward_weights),
        trials_dir=expand_user(trials_dir).absolute() if trials_dir else None,
        keep=keep_trials,
    )
    if [bool(tasks_dir), bool(dataset), file_tasks is not None].count(True) != 1:
        raise UsageError("tasks_dir, dataset or file_tasks: give one of them")
    if registry is not None and not dataset:
        raise UsageError("registry has an effect only with dataset: leave it out, or set dataset")
    if dataset:
        from rlkit.envs.harbor.registries.registry import fetch

        tasks = fetch(dataset, selection, registry=registry, note=note, pin=pin)
    else:
        tasks = _read_tasks(tasks_dir or "", file_tasks, selection)
    return [HarborTask(task_id=name, path=path, settings=settings) for name, path in tasks.items()]


def _read_tasks(tasks_dir: str, file_tasks: dict[str, JsonValue] | None, selection: Selection) -> dict[str, Path]:
    folder = Path(tasks_dir)
    if file_tasks is not None:
        from rlkit.envs.harbor.generated.file_tasks import FileTasksSettings
        from rlkit.envs.harbor.generated.task_folders import cache_file_tasks

        folder = cache_file_tasks(validate_fields(FileTasksSettings, file_tasks, place="file_tasks"))
    tasks = find_tasks(folder)
    selected = {name: tasks[name] for name in selection.select(list(tasks))}
    require_readable(selected)
    return selected
