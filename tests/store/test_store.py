from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from rlkit._util.files import json_lines
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.config.schema import Config, EnvConfig
from rlkit.config.schema.envs import EvalConfig, EvalEnvConfig
from rlkit.cost.budget import Budget
from rlkit.cost.usage import Usage
from rlkit.env import Task
from rlkit.envs.arithmetic import arithmetic
from rlkit.errors import RolloutsFailed, RunFailed, UsageError
from rlkit.store import RunStore, checkpoints, codec, table
from rlkit.store.history import (
    GroupRecord,
    list_state_steps,
    load_resume_history,
    read_groups,
    read_metrics,
    state_path,
    table_path,
)
from rlkit.store.journal import Journal, RecordKind, read_records
from rlkit.token_records.pieces import pieces_path, read_pieces
from rlkit.types import Checkpoint, Episode, Group, Json, Message
from tests.builders import episode, piece, turn
from tests.limits import HANG_S

RESOLVED = ResolvedConfig.from_python(Config(envs={"arithmetic": EnvConfig()}, seed=5))


@pytest.mark.parametrize(("envs", "is_single"), [(["sums"], True), (["sums", "words"], False)])
def test_metrics_of_a_single_environment_are_written_once(envs: list[str], is_single: bool, tmp_path: Path) -> None:
    resolved = ResolvedConfig.from_python(Config(envs={name: EnvConfig() for name in envs}, seed=5))
    metrics = {"env/sums/reward/mean": 0.5, "env/all/reward/mean": 0.5, "env/sums/tasks/best": 2.0, "optim/kl": 0.0}
    with RunStore(tmp_path / "run", resolved=resolved) as store:
        store.add_metrics(1, metrics)
        assert store.read_metrics() == [(1, metrics)]
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert set(line) == {"step", *metrics} - ({"env/all/reward/mean"} if is_single else set())


@pytest.mark.parametrize("is_trained", [True, False])  # the first evaluation comes before the first step
@pytest.mark.parametrize(
    ("evals", "more", "is_single"),
    [
        (["sums"], {}, True),
        (["sums", "words"], {}, False),
        (["sums"], {"eval/all/level/1/tasks": 4.0}, False),  # what cannot be restored exactly stays
        (["sums"], {"eval/sums/own/metric": 4.0}, False),
    ],
)
def test_metrics_of_a_single_evaluation_are_written_once(
    evals: list[str], more: dict[str, float], is_single: bool, is_trained: bool, tmp_path: Path
) -> None:
    settings = EvalConfig(envs={name: EvalEnvConfig() for name in evals}, every=1)
    resolved = ResolvedConfig.from_python(Config(envs={"train": EnvConfig()}, eval=settings, seed=5))
    own = {
        "reward/mean": 0.5,
        "reward/mean/low": 0.25,
        "pass_at_1": 0.5,
        "level/1/tasks": 4.0,
        "level/1/pass_at_1": 1.0,
    }
    copies = {f"eval/all/{name}": value for name, value in own.items() if not name.startswith("level/")}
    metrics = (
        {f"eval/sums/{name}": value for name, value in own.items()} | {"eval/sums/teacher/kl": 0.1} | more | copies
    )
    trained = {"env/train/reward/mean": 0.1, "env/all/reward/mean": 0.1}
    metrics = trained | metrics if is_trained else metrics
    with RunStore(tmp_path / "run", resolved=resolved) as store:
        store.add_metrics(1, metrics)
        assert store.read_metrics() == [(1, metrics)]
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    left_out = {"env/all/reward/mean"} | (set(copies) if is_single else set())
    assert set(line) == {"step", *metrics} - left_out


def test_a_run_is_readable_with_plain_tools(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        store.add_metrics(1, {"env/all/reward/mean": 0.5})
        store.add_metrics(2, {"env/all/reward/mean": 0.75})
        store.add_checkpoint(Checkpoint(2, "tinker://a/weights/b", "tinker://a/sampler_weights/b", expires=3.0))
        store.metadata.set_status("completed")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "env/all/reward/mean": 0.5},
        {"step": 2, "env/all/reward/mean": 0.75},
    ]
    (checkpoint,) = (tmp_path / "run" / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(checkpoint)["state"] == "tinker://a/weights/b"
    metadata = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (metadata["status"], metadata["seed"], metadata["format"]) == ("completed", 5, 2)
    assert metadata["versions"]["tinker"]
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 5


def test_the_recorded_configuration_is_a_configuration(tmp_path: Path) -> None:
    from rlkit.config.loading.load import load_config

    RunStore(tmp_path / "run", resolved=RESOLVED).__exit__()
    assert load_config([tmp_path / "run" / "config.yaml"]).config == RESOLVED.config


def test_a_finished_run_is_not_overwritten(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        store.add_metrics(1, {})
    with pytest.raises(
        UsageError, match=r"already holds a run: resume it \(--resume\), or choose another `name` \(--name\)"
    ):
        RunStore(tmp_path / "run", resolved=RESOLVED)


def test_run_without_draws_is_replaced(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        store.metadata.set_status("failed", error="no such model")
    with RunStore(tmp_path / "run", resolved=RESOLVED):
        assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"


def test_two_processes_cannot_write_to_one_run(tmp_path: Path) -> None:
    with (
        RunStore(tmp_path / "run", resolved=RESOLVED),
        pytest.raises(UsageError, match="another process is writing to"),
    ):
        RunStore(tmp_path / "run", resolved=RESOLVED)


def test_folder_that_cannot_be_created_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="RLKIT_RUNS_DIR"):
        RunStore(tmp_path / "file" / "run", resolved=RESOLVED)


def test_recorded_error_of_a_run_is_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_PASSWORD", "swordfish in the well")
    config = Config(
        envs={"arithmetic": EnvConfig(args={"api_key": "abcd1234abcd1234", "token": "abcd1234abcd1234xyz"})}
    )
    with RunStore(tmp_path / "run", resolved=ResolvedConfig.from_python(config)) as store:
        error = "401 for abcd1234abcd1234, abcd1234abcd1234xyz, sk-live-abcdefghij123456 and swordfish in the well"
        store.metadata.set_status("failed", error=error)
    metadata = json.loads((tmp_path / "run" / "run.json").read_text())
    assert metadata["error"] == "401 for [redacted], [redacted], [redacted] and ***"


def test_later_record_of_an_attempt_replaces_its_reward(tmp_path: Path) -> None:
    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({}, piece=piece)
            for draw in (0, 1):
                task = Task(draw, "arithmetic", arithmetic()[draw])
                store.record_draw(task)
                store.record_episode(task, episode(None))
                for reward in (0.5, 2.0):
                    store.record_episode(task, replace(episode(reward), attempt=1))
            await store.record_step([GroupRecord(0, is_trained=True, size=1)], {})
            await store.close()

    asyncio.run(main())
    (record,) = read_groups(table_path(tmp_path / "run", 1))
    assert [attempt.reward for attempt in record.attempts] == [None, 2.0]
    assert record.group.rewards.tolist() == [2.0]
    assert [attempt.reward for attempt in load_resume_history(tmp_path / "run").attempts[1]] == [None, 2.0]


def test_numbers_that_are_not_finite_are_written_as_null_and_left_out_when_read(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        store.add_metrics(1, {"loss": float("nan"), "kl": float("inf"), "reward": 0.5})
        assert store.read_metrics() == [(1, {"reward": 0.5})]
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "loss": None, "kl": None, "reward": 0.5}


@pytest.mark.parametrize(
    ("steps", "through"),
    [([], 0), ([1, 2, 3], 3), ([0, 1, 2], 2), ([0], 0), ([1, 3], 1), ([2, 3], 0), ([1, 9], 1)],
)
def test_a_run_knows_up_to_which_step_no_line_of_its_metrics_is_missing(
    steps: list[int], through: int, tmp_path: Path
) -> None:
    def check(store: RunStore) -> None:
        assert store.find_last_measured_step(9) == through
        assert store.find_last_measured_step(1) == min(through, 1)
        assert sorted(store.measured_steps) == steps

    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        for step in steps:
            store.add_metrics(step, {"reward": 1.0})
        check(store)
    if steps:
        with RunStore(tmp_path / "run", resolved=RESOLVED, resume=True) as store:
            check(store)  # as it stands on the disk


def test_directory_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run holds no run to resume"):
        RunStore(tmp_path / "run", resolved=RESOLVED, resume=True)
    assert not (tmp_path / "run").exists()


def test_run_that_cannot_be_opened_is_not_locked(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        store.add_metrics(1, {})
    with pytest.raises(UsageError, match="already holds a run"):
        RunStore(tmp_path / "run", resolved=RESOLVED)
    with RunStore(tmp_path / "run", resolved=RESOLVED, resume=True):
        pass  # whoever was refused has let go of it


def resume_run(directory: Path, check: Callable[[RunStore], None]) -> None:
    """Resume a run, check it, and close it."""

    async def main() -> None:
        with RunStore(directory, resolved=RESOLVED, resume=True) as store:
            store.open({}, piece=piece)
            check(store)
            await store.close()

    asyncio.run(main())


def train_steps(directory: Path, count: int, check: Callable[[RunStore], None]) -> None:
    """Start a run and record `count` steps."""

    async def main() -> None:
        with RunStore(directory, resolved=RESOLVED) as store:
            store.open({"drawn": 0}, piece=piece)
            record_steps(store, count)
            await store.flush()
            check(store)
            await store.close()

    asyncio.run(main())


def test_resumed_run_clears_its_error_but_keeps_the_retry(tmp_path: Path) -> None:
    def read_metadata() -> dict[str, object]:
        return json.loads((tmp_path / "run" / "run.json").read_text())

    def fail(store: RunStore) -> None:
        store.metadata.record_error(RolloutsFailed("no room"))
        store.metadata.record_error(ValueError("closed"))  # follows from the first
        recorded = (read_metadata()["status"], read_metadata()["error"], store.metadata.retry_failed)
        assert recorded == ("failed", "RolloutsFailed: no room", True)

    def go_on(store: RunStore) -> None:
        assert (read_metadata()["status"], read_metadata().get("error"), read_metadata()["started"]) == (
            "running",
            None,
            started,
        )
        assert store.metadata.retry_failed is True
        store.metadata.record_error(ValueError("no room"))  # what is to be played again stays so
        assert read_metadata()["retry_failed_rollouts"] is True

    train_steps(tmp_path / "run", 1, fail)
    started = read_metadata()["started"]
    resume_run(tmp_path / "run", go_on)


def test_resuming_removes_incomplete_files_and_lines(tmp_path: Path) -> None:
    half = tmp_path / "run" / "state" / ".step=000001.json.abcd.tmp"

    def be_killed(store: RunStore) -> None:
        store.add_metrics(1, {"reward": 1.0})
        store.add_checkpoint(Checkpoint(1, "tinker://a/weights/b", "tinker://a/sampler_weights/b", expires=None))
        half.write_text("{")
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "rew')

    def go_on(store: RunStore) -> None:
        assert not half.exists()
        store.add_metrics(2, {"reward": 2.0})
        assert store.read_metrics() == [(1, {"reward": 1.0}), (2, {"reward": 2.0})]
        assert [checkpoint.step for checkpoint in checkpoints(store.directory)] == [1]

    train_steps(tmp_path / "run", 1, be_killed)
    resume_run(tmp_path / "run", go_on)


def test_usage_is_read_by_the_next_process_of_the_same_run_only(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        assert make_budget(store).usage == Usage()
        for tokens in (5, 7):
            make_budget(store, sampled_tokens=tokens).write()
        assert make_budget(store).usage == Usage(sampled_tokens=12)
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:  # it finished nothing, so it is replaced
        assert make_budget(store).usage == Usage()


def test_checkpoints_reflect_the_last_line_of_each(
    tmp_path: Path,
) -> None:
    first, second, third = (
        Checkpoint(step, f"tinker://a/weights/{step}", f"tinker://a/sampler_weights/{step}", expires=None)
        for step in (1, 2, 3)
    )
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        for checkpoint in (first, second, third):
            store.add_checkpoint(checkpoint)
        store.remove_checkpoint(second)
        store.add_checkpoint(replace(first, expires=9.0))
        assert checkpoints(store.directory) == [replace(first, expires=9.0), third]


def make_budget(store: RunStore, sampled_tokens: int = 0) -> Budget:
    usage = Usage(sampled_tokens=sampled_tokens)
    config = RESOLVED.config
    return Budget(config, store.directory, price=None, used=lambda: usage, clock=lambda: 0.0, note=pytest.fail)


def with_secrets(episode: Episode, secret: str) -> Episode:
    nested = {"deep": [secret, {"deeper": f"a {secret}"}], "number": 5, "none": None}
    return replace(episode, error=f"401 for {secret}", info=nested)


SAFE = {"deep": ["***", {"deeper": "a ***"}], "number": 5, "none": None}


@pytest.mark.parametrize("info", [{}, {"number": 5}])
def test_error_is_redacted_if_nothing_else_has_secrets(
    info: dict[str, Json], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SITE_PASSWORD", "swordfish in the well")

    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({}, piece=piece)
            task = Task(0, "arithmetic", arithmetic()[0])
            store.record_draw(task)
            store.record_episode(task, replace(episode(None), error="401 for swordfish in the well", info=info))
            await store.close()

    asyncio.run(main())
    (attempt,) = load_resume_history(tmp_path / "run").attempts[0]
    assert (attempt.error, attempt.info) == ("401 for ***", info)


@pytest.mark.parametrize("secret", ["swordfish in the well", "#swordfish in the well"])
def test_recorded_episodes_are_redacted(secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_PASSWORD", secret)

    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({}, piece=piece)
            for draw in (0, 1):
                task = Task(draw, "arithmetic", arithmetic()[draw])
                store.record_draw(task)
                store.record_episode(task, with_secrets(episode(1.0), secret))
            await store.record_step([GroupRecord(0, is_trained=True, size=1)], {})
            failed = with_secrets(episode(None, member=1), secret)
            played = Group("arithmetic", "task", 0, (episode(1.0),))
            await store.write_evaluation(4, [(played, [episode(1.0), failed])])
            await store.close()

    asyncio.run(main())
    (trained,) = read_groups(table_path(tmp_path / "run", 1))
    (evaluated,) = read_groups(table_path(tmp_path / "run", 4, kind="evaluation"))
    waiting = load_resume_history(tmp_path / "run").attempts[1]
    for attempt in (*trained.attempts, *waiting, evaluated.attempts[1]):
        assert (attempt.error, attempt.info) == ("401 for ***", SAFE)
    assert (evaluated.group.task, evaluated.group.rewards.tolist()) == ("task", [1.0])
    assert [attempt.status for attempt in evaluated.attempts] == ["completed", "failed"]


def test_resume_history_has_outstanding_draws_and_the_state_before_them(tmp_path: Path) -> None:
    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({"drawn": 0}, piece=piece)
            for draw in range(4):
                task = Task(draw, "arithmetic", arithmetic()[draw])
                store.record_draw(task)
                if draw != 3:
                    store.record_episode(task, episode(float(draw)))
            await store.record_step([GroupRecord(0, is_trained=True, size=1)], {"drawn": 4})
            await store.record_step([GroupRecord(2, is_trained=False, size=1)], {"drawn": 4})
            (record,) = await store.read_groups(2)
            assert (record.group.draw, record.is_trained, record.group.rewards.tolist()) == (2, False, [2.0])
            await store.close()
        with RunStore(tmp_path / "run", resolved=RESOLVED, resume=True) as store:
            history = store.open({"drawn": -1}, piece=piece)
            assert (history.step, history.state_step, history.state) == (2, 0, {"drawn": 0})
            assert list(history.outstanding) == [1, 3]
            assert [item.reward for item in history.attempts[1]] == [1.0]
            task = Task(3, "arithmetic", arithmetic()[3])
            store.record_episode(task, episode(3.0))
            await store.record_step(
                [GroupRecord(1, is_trained=True, size=1), GroupRecord(3, is_trained=True, size=1)], {"drawn": 9}
            )
            await store.flush()
            assert [item.group.draw for item in await store.read_groups(3)] == [1, 3]
            await store.close()
        history = load_resume_history(tmp_path / "run")
        assert (history.step, history.state_step, history.state, history.outstanding) == (3, 3, {"drawn": 9}, {})

    asyncio.run(main())


def test_run_with_draws_only_is_replaced_completely(tmp_path: Path) -> None:
    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({"drawn": 5}, piece=piece)
            store.record_draw(Task(7, "arithmetic", arithmetic()[0]))
            await store.close()
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            history = store.open({"drawn": 0}, piece=piece)
            assert (history.step, history.state, history.outstanding) == (0, {"drawn": 0}, {})
            await store.close()

    asyncio.run(main())


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_run_whose_description_was_never_finished_is_replaced(content: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(content)
    with RunStore(tmp_path / "run", resolved=RESOLVED):
        assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "running"


def test_failed_write_ends_the_run_and_names_the_path(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
        store.open({}, piece=piece)
        budget = make_budget(store)
        for name in ("usage.json", "metrics.jsonl", "checkpoints.jsonl"):
            (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / "evaluations").write_text("")
        checkpoint = Checkpoint(1, "tinker://a/weights/b", "tinker://a/sampler_weights/b", expires=None)
        played = Group("arithmetic", "task", 0, (episode(1.0),))
        for write in (
            budget.write,
            lambda: store.add_metrics(1, {}),
            lambda: store.add_checkpoint(checkpoint),
            lambda: store.remove_checkpoint(checkpoint),
            lambda: asyncio.run(store.write_evaluation(1, [(played, played.episodes)])),
        ):
            with pytest.raises(RunFailed, match=f"cannot write to {tmp_path / 'run'}: "):
                write()
        asyncio.run(store.close())


def record_steps(store: RunStore, count: int) -> list[Awaitable[None]]:
    """Record `count` steps of one group each."""
    writes = list[Awaitable[None]]()
    for draw in range(count):
        task = Task(draw, "arithmetic", arithmetic()[draw])
        store.record_draw(task)
        store.record_episode(task, episode(1.0))
        writes.append(store.record_step([GroupRecord(draw, is_trained=True, size=1)], {"drawn": draw + 1}))
    return writes


def test_table_of_a_step_is_written_after_its_journal_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()

    def fsync(file: int) -> None:
        free.wait(HANG_S)

    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({}, piece=piece)
            monkeypatch.setattr("rlkit.store.journal.os", SimpleNamespace(fsync=fsync, fstat=os.fstat))
            (write,) = record_steps(store, 1)
            await asyncio.sleep(0.3)
            assert not table_path(tmp_path / "run", 1).exists()
            free.set()
            await write
            await store.flush()
            assert table_path(tmp_path / "run", 1).exists()
            await store.close()

    asyncio.run(main())


def test_store_is_settled_once_all_tables_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = table.write

    def slow_at_first(path: Path, groups: Sequence[table.RecordedGroup]) -> None:
        if path == table_path(tmp_path / "run", 1):
            time.sleep(0.3)
        write(path, groups)

    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({}, piece=piece)
            monkeypatch.setattr(table, "write", slow_at_first)
            record_steps(store, 2)
            await store.flush()
            assert [table_path(tmp_path / "run", step).exists() for step in (1, 2)] == [True, True]
            assert list_state_steps(tmp_path / "run") == [2]  # what nobody goes back to is gone
            await store.close()

    asyncio.run(main())


def test_episode_record_begins_with_its_draw_in_eight_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({}, piece=piece)
            task = Task(258, "arithmetic", arithmetic()[0])
            store.record_draw(task)
            store.record_episode(task, episode(1.0))
            await store.close()

    asyncio.run(main())
    draw_record, episode_record = read_records(tmp_path / "run" / "journal")
    assert json.loads(draw_record.content) == {"draw": 258, "env": "arithmetic", "task": arithmetic()[0].task_id}
    assert episode_record.content[:8] == (258).to_bytes(8, "little")
    assert codec.decode(episode_record.content[8:]).reward == 1.0


def test_missing_table_of_a_recorded_step_is_written_on_resume(tmp_path: Path) -> None:
    train_steps(tmp_path / "run", 1, lambda store: None)
    path = table_path(tmp_path / "run", 1)
    assert [record.group.rewards.tolist() for record in read_groups(path)] == [[1.0]]

    async def killed() -> None:
        with RunStore(tmp_path / "other", resolved=RESOLVED) as store:
            store.open({}, piece=piece)
            task = Task(0, "arithmetic", arithmetic()[0])
            store.record_draw(task)
            store.record_episode(task, episode(0.5))
            await store.close()
        journal = Journal(tmp_path / "other" / "journal", segment=1)
        journal.append(
            RecordKind.STEP, json.dumps({"step": 1, "groups": [{"draw": 0, "counts": True, "size": 1}]}).encode()
        )
        await journal.close()

    def decoded(store: RunStore) -> None:
        (record,) = read_groups(table_path(tmp_path / "other", 1))
        assert (record.group.rewards.tolist(), record.is_trained) == ([0.5], True)

    asyncio.run(killed())
    assert not table_path(tmp_path / "other", 1).exists()
    resume_run(tmp_path / "other", decoded)


def test_tables_hold_messages_as_they_were_and_each_token_has_a_piece(tmp_path: Path) -> None:
    messages: tuple[Message, ...] = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"})
    chatted = episode(1.0, turns=[replace(turn([1, 2], [7, 8]), messages=messages)])

    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({}, piece=piece)
            record_steps(store, 1)
            await store.write_evaluation(1, [(Group("e", "task", 0, (chatted,)), [chatted])])
            await store.flush()
            await store.close()

    asyncio.run(main())
    (group,) = read_groups(table_path(tmp_path / "run", 1, kind="evaluation"))
    assert group.group.episodes[0].turns[0].messages == messages
    assert codec.decode(codec.encode(chatted)).turns[0].messages == messages
    assert read_pieces(pieces_path(tmp_path / "run")) == {token: piece(token) for token in (1, 2, 3, 4, 7, 8)}


def test_malformed_checkpoint_line_is_reported_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints.jsonl"
    for line in ({"step": 1}, {"step": 1, "state": "a", "sampler": "b", "expires": "soon"}, {"step": "1"}):
        path.write_text(json.dumps(line) + "\n")
        with pytest.raises(UsageError, match=r"checkpoints\.jsonl is damaged: a line is not a checkpoint"):
            checkpoints(tmp_path)


def test_findings_are_kept_with_the_run(tmp_path: Path) -> None:
    def findings() -> object:
        return json.loads((tmp_path / "run" / "run.json").read_text()).get("findings")

    train_steps(
        tmp_path / "run", 1, lambda store: store.metadata.record_findings([{"rule": "blocked"}, {"rule": "blocked"}])
    )
    assert findings() == [{"rule": "blocked"}, {"rule": "blocked"}]
    with RunStore(tmp_path / "run", resolved=RESOLVED, resume=True):
        assert findings() == [{"rule": "blocked"}, {"rule": "blocked"}]


def test_a_run_that_began_keeps_the_state_of_its_beginning(tmp_path: Path) -> None:
    async def opened(initial: dict[str, Json], *, resume: bool) -> tuple[int, dict[str, Json]]:
        with RunStore(tmp_path / "run", resolved=RESOLVED, resume=resume) as store:
            history = store.open(initial, piece=piece)
            await store.close()
            return history.step, dict(history.state)

    assert asyncio.run(opened({"first": 1}, resume=False)) == (0, {"first": 1})
    assert asyncio.run(opened({"second": 2}, resume=True)) == (0, {"first": 1})


def test_table_write_failure_ends_the_run_and_keeps_the_journal(tmp_path: Path) -> None:
    async def main() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({"drawn": 0}, piece=piece)
            (tmp_path / "run" / "episodes").write_text("")
            (write,) = record_steps(store, 1)
            await write  # the record of the step is on the disk
            with pytest.raises(RunFailed, match=f"cannot write to {tmp_path / 'run'}: "):
                await store.flush()
            with pytest.raises(RunFailed, match="cannot write"):
                record_steps(store, 2)
            await store.close()  # whoever needed it has been told

    asyncio.run(main())
    (tmp_path / "run" / "episodes").unlink()
    history = load_resume_history(tmp_path / "run")
    assert (history.step, list_state_steps(tmp_path / "run")) == (1, [0])
    assert [record.group.rewards.tolist() for record in history.groups(1)] == [[1.0]]


def test_run_with_draws_only_cannot_resume_without_its_state(tmp_path: Path) -> None:
    async def draw() -> None:
        with RunStore(tmp_path / "run", resolved=RESOLVED) as store:
            store.open({"drawn": 0}, piece=piece)
            store.record_draw(Task(0, "arithmetic", arithmetic()[0]))
            await store.close()

    asyncio.run(draw())
    state_path(tmp_path / "run", 0).unlink()
    with pytest.raises(UsageError, match="cannot be resumed without it"):
        resume_run(tmp_path / "run", lambda store: None)
    assert list_state_steps(tmp_path / "run") == []


def test_bytes_that_are_not_text_are_reported_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n')
    for read in (json_lines.read_lines, read_metrics, json_lines.read_object, json_lines.repair):
        with pytest.raises(UsageError, match=r"metrics\.jsonl is damaged: .*can't decode byte 0xff"):
            read(path)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_damaged_state_is_an_error_with_advice(content: str, tmp_path: Path) -> None:
    train_steps(tmp_path / "run", 1, lambda store: None)
    state_path(tmp_path / "run", 1).write_text(content)
    with pytest.raises(UsageError, match=r"step=000001\.json is damaged: .*; the run cannot be resumed without it"):
        load_resume_history(tmp_path / "run")
