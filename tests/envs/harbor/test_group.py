"""Groups of real trials, played as a run plays them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlkit._util import threads
from rlkit._util.priority_semaphore import Slots
from rlkit._util.threads import run_together
from rlkit.env import Task
from rlkit.envs.harbor import harbor
from rlkit.policy import Limits
from rlkit.rollout.player import Player
from rlkit.rollout.runner import LocalRunner
from rlkit.rollout.settings import EnvSettings
from rlkit.rollout.task_guard import stop_leftover_tasks
from rlkit.testing import ByteChat, ScriptedSampler
from rlkit.types import Episode, Group, Sampling

from .conftest import left
from .environments import SometimesThere
from .test_task import says

pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]

EXAMPLES = Path(__file__).parents[3] / "examples" / "tasks"
TRIED = "echo tried\n"
SOLUTIONS = {
    "hello.txt": "echo 'Hello, world!' > hello.txt\n",
    "report.json": 'echo \'{"rows": 11, "best_product": "desk"}\' > report.json\n',
}
SIZE = 4


def half(prompt: str, *, seed: int) -> str:
    """Solves a task where the seed of the first turn is even, and says that it is done whatever became of it."""
    if "echo tried" in prompt:
        return says(done=True)
    (command,) = [command for file, command in SOLUTIONS.items() if f"/app/{file}" in prompt or f"`{file}`" in prompt]
    return says(*([command] if seed % 2 == 0 else []), TRIED)


def test_rewards_of_a_group_are_exactly_the_verifiers_rewards(cache: Path, tmp_path: Path) -> None:
    tasks = harbor(
        tasks_dir=str(EXAMPLES),
        task_ids=["hello-world", "sales-report"],
        trials_dir=str(tmp_path),
        keep_trials="all",
        max_starting=3,
        max_playing=2,
        max_verifying=2,
    )
    chat = ByteChat()
    settings = EnvSettings(SIZE, Sampling(max_tokens=1 << 20), 60, 0, Limits())
    player = Player(LocalRunner(chat), {"terminal": settings}, seed=0, slots=Slots(100))
    sampler = ScriptedSampler(half, chat=chat)

    @stop_leftover_tasks()
    async def main() -> list[Group]:
        drawn_tasks = [Task(draw, "terminal", env) for draw, env in enumerate(tasks)]
        return await run_together(player.play(task, lambda: sampler) for task in drawn_tasks)

    groups = {group.task: group for group in threads.run(main())}
    for group in groups.values():
        assert [episode.error for episode in group.episodes] == [None] * SIZE
        assert group.rewards.tolist() == [read_verifier_reward(episode.info["trial"]) for episode in group.episodes]
        assert all(turn.parent == number - 1 for e in group.episodes for number, turn in enumerate(e.turns) if number)
    assert sorted(groups["hello-world"].rewards.tolist()) == [0.0, 0.0, 1.0, 1.0]
    assert sorted(groups["sales-report"].rewards.tolist()) == [0.0, 0.0, 0.5, 0.5]
    assert left(cache) == []


def test_a_broken_environment_gives_no_reward_and_the_trial_is_retried(cache: Path) -> None:
    name = f"{SometimesThere.__module__}:SometimesThere"
    (task,) = harbor(tasks_dir=str(EXAMPLES), task_ids=["hello-world"], environment=name)
    chat = ByteChat()
    settings = EnvSettings(2, Sampling(max_tokens=1 << 20), 60, 2, Limits())
    failed = list[str]()

    def record(drawn_task: Task, episode: Episode) -> None:
        failed.extend([episode.error] if episode.error else [])

    player = Player(LocalRunner(chat), {"terminal": settings}, seed=0, slots=Slots(100), record=record)
    sampler = ScriptedSampler(half, chat=chat)
    SometimesThere.failures = 2

    @stop_leftover_tasks()
    async def main() -> Group:
        return await player.play(Task(0, "terminal", task), lambda: sampler)

    group = threads.run(main())
    assert failed == ["environment_error: RuntimeError: the sandbox did not come up"] * 2
    assert group.valid_mask.all()
    assert sum(episode.attempt for episode in group.episodes) == 2


def read_verifier_reward(trial: object) -> float:
    verifier = Path(str(trial)) / "verifier"
    if (verifier / "reward.json").exists():
        return json.loads((verifier / "reward.json").read_text())["reward"]
    return float((verifier / "reward.txt").read_text())
