"""Tasks of Harbor: a folder with an instruction, an environment and tests, for an agent that works in a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, JsonValue

from rlkit.envs.harbor.outcome import Reward, Rule, Rules
from rlkit.envs.harbor.phases import PhaseLimits
from rlkit.envs.harbor.tasks import Selection, Split, find, read
from rlkit.errors import UsageError
from rlkit.types import Json

if TYPE_CHECKING:
    from rlkit.envs.harbor.task import HarborTask

# Before Harbor is imported: it would ask the network for a table of prices, and tell its makers about runs.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HARBOR_TELEMETRY", "0")

__all__ = ["harbor"]

type Count = Annotated[int, Field(ge=1)]
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
    max_tasks: Count | None = None,
    shuffle: bool = True,
    seed: int = 0,
    environment: str = "local",
    environment_kwargs: dict[str, JsonValue] | None = None,
    cpus: Count | None = None,
    memory_mb: Count | None = None,
    storage_mb: Count | None = None,
    force_build: bool = False,
    agent: Literal["terminus2", "shell"] = "terminus2",
    max_turns: Count | None = None,
    parser: Literal["json", "xml"] = "json",
    summarize: bool = False,
    agent_kwargs: dict[str, JsonValue] | None = None,
    agent_timeout_s: Seconds | None = None,
    verifier_timeout_s: Seconds | None = None,
    timeout_multiplier: Seconds = 1.0,
    reward_key: str | None = None,
    reward_weights: dict[str, float] | None = None,
    on_timeout: Rule = "verify",
    on_overflow: Rule = "verify",
    on_agent_error: Rule = "drop",
    on_environment_error: Rule = "drop",
    max_starting: Count | None = None,
    max_playing: Count | None = None,
    max_verifying: Count | None = None,
    starts_per_s: Seconds | None = None,
    trials_dir: str | None = None,
    keep_trials: Literal["all", "failed", "none"] = "none",
    recorded: Callable[[Json], Json] = lambda now: now,
    note: Callable[[str], None] = lambda message: None,
) -> Sequence[HarborTask]:
    """Tasks of Harbor, played by Terminus 2, or in a plain shell, with the model that is trained.

    Args:
        tasks_dir: a task, a folder of tasks, or a folder of such folders.
        dataset: of a registry instead, as `name@version`.
        registry: its file or URL, in Harbor's form or terminal-bench 1's; by default the published one that has it.
        file_tasks: instead, small tasks about files: `{variants: 12, held_out: 4, seed: 0}`.
        task_ids: globs of the tasks that are played; all without any.
        exclude: globs of those that are not.
        split: `eval` is what is kept for evaluation, `train` the rest. The two never share a task.
        eval_fraction: about this share is kept, by a hash of the task's id; a fifth by default.
        eval_tasks: globs of the tasks that are kept, instead.
        max_tasks: at most so many.
        shuffle: in an order that `seed` decides; otherwise by id.
        seed: of the order.
        environment: `local`, a type of Harbor's such as `docker`, or `package.module:Class`.
        environment_kwargs: what its class takes.
        cpus: instead of what tasks ask for.
        memory_mb: likewise.
        storage_mb: likewise.
        force_build: build images anew.
        agent: `terminus2`, or `shell`: one command a turn, for small models.
        max_turns: replies of the model in one rollout; by default as many as its time and its context allow.
        parser: the form of its replies to Terminus 2.
        summarize: Terminus 2 goes on from a summary when the context is nearly full; it is trained on, too.
        agent_kwargs: other options of the agent.
        agent_timeout_s: instead of what tasks say; half an hour where neither they nor `max_turns` set an end.
        verifier_timeout_s: likewise.
        timeout_multiplier: of every time limit of the tasks.
        reward_key: which number of `reward.json` is the reward; by default `reward`, or the only one.
        reward_weights: by key; the reward is the weighted sum.
        on_timeout: what an episode is worth whose agent ran out of time.
        on_overflow: whose context was full.
        on_agent_error: whose agent failed.
        on_environment_error: whose environment or verifier failed.
        max_starting: environments that are set up at one time; any number by default.
        max_playing: agents that work at one time; the others wait with an environment that has started.
        max_verifying: verifiers that run at one time.
        starts_per_s: environments that are started in a second.
        trials_dir: where the folders of trials are.
        keep_trials: which of them stay.
        recorded: told the commit of a dataset that follows a branch; gives that of when the run began.
        note: told what is fetched, and what of a task of terminal-bench 1 is not as it was there.

    Raises:
        UsageError: there is no such task, or what is asked for makes no sense.
        MissingError: a dataset cannot be downloaded.
    """
    from rlkit.envs.harbor.settings import Agent, TrialSettings
    from rlkit.envs.harbor.settings import environment as named_environment
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
        environment=named_environment(
            environment,
            environment_kwargs,
            cpus=cpus,
            memory_mb=memory_mb,
            storage_mb=storage_mb,
            force_build=force_build,
        ),
        agent=Agent(agent, max_turns, parser, summarize, agent_kwargs or {}),
        agent_timeout_s=agent_timeout_s,
        verifier_timeout_s=verifier_timeout_s,
        timeout_multiplier=timeout_multiplier,
        phases=PhaseLimits(max_starting, max_playing, max_verifying, starts_per_s),
        rules=Rules(on_timeout, on_overflow, on_agent_error, on_environment_error),
        reward=Reward(reward_key, reward_weights),
        trials_dir=Path(trials_dir).expanduser().absolute() if trials_dir else None,
        keep=keep_trials,
    )
    if [bool(tasks_dir), bool(dataset), file_tasks is not None].count(True) != 1:
        raise UsageError("tasks_dir, dataset or file_tasks: give one of them")
    if registry is not None and not dataset:
        raise UsageError("registry has an effect on a dataset only: leave it out, or name a dataset")
    if dataset:
        from rlkit.envs.harbor.registries.registry import fetch

        tasks = fetch(dataset, selection, registry=registry, note=note, recorded=recorded)
    else:
        tasks = _select_tasks(_tasks_folder(tasks_dir or "", file_tasks), selection)
    return [HarborTask(task_id=name, path=path, settings=settings) for name, path in tasks.items()]


def _tasks_folder(tasks_dir: str, file_tasks: dict[str, JsonValue] | None) -> Path:
    if file_tasks is None:
        return Path(tasks_dir)
    from rlkit.envs.harbor.generated.file_tasks import FileTasks
    from rlkit.envs.harbor.generated.task_folders import cached_file_tasks

    return cached_file_tasks(FileTasks.read(file_tasks))


def _select_tasks(folder: Path, selection: Selection) -> dict[str, Path]:
    found = find(folder)
    chosen = {name: found[name] for name in selection.of(list(found))}
    read(chosen)
    return chosen
