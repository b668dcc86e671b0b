"""The data of the pages is what a run recorded."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlkit._util.files import run_locks
from rlkit.envs.harbor.trial_files import list_files
from rlkit.errors import UsageError
from rlkit.store import table
from rlkit.store.history import read_groups, read_metrics, table_path
from rlkit.token_records.pieces import PieceWriter, pieces_path
from rlkit.token_records.updates import read_update, update_path
from rlkit.types import Episode, Group, Image, Message, Prompt
from rlkit.view.library import Library
from tests.builders import episode, piece, turn
from tests.trackers.folders import write_run
from tests.view.mixed_run import record_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one run, `mixed`."""
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder / "mixed")
    return folder


def get(folder: Path, path: str, /, **query: str) -> Any:
    return json.loads(Library([folder]).respond(path, query))


def test_a_step_shows_its_groups_as_they_were_recorded(folder: Path) -> None:
    for number in (1, 2, 3):
        recorded = read_groups(table_path(folder / "mixed", number))
        updates = read_update(update_path(folder / "mixed", number))
        groups = get(folder, f"run/mixed/step/{number}")["groups"]
        assert [group["task"] for group in groups] == [record.group.task for record in recorded]
        for shown, record in zip(groups, recorded, strict=True):
            update, members = updates[record.group.draw], shown["members"]
            assert (shown["estimator"], shown["baseline"]) == (update.estimator, update.baseline)
            assert shown["taught"] == bool(update.sequences)
            assert [member["reward"] for member in members] == [e.reward for e in record.group.episodes]
            assert [member["tokens"] for member in members] == [e.sampled_tokens for e in record.group.episodes]
            assert len(shown["failed_attempts"]) == len(record.attempts) - len(record.group.episodes)
            for member in members:
                rows = [s.advantages for s in update.sequences if s.member == member["member"]]
                if rows:
                    assert member["advantage"] == pytest.approx(float(np.concatenate(rows).mean()))


def test_a_group_that_taught_nothing_says_why(folder: Path) -> None:
    groups = [group for number in (1, 2, 3) for group in get(folder, f"run/mixed/step/{number}")["groups"]]
    reasons = {group["task"]: group["reason"] for group in groups}
    for group in groups:
        number, rewards = int(group["task"].removeprefix("task-")), {m["reward"] for m in group["members"]}
        if number % 5 == 2:
            assert reasons[group["task"]] == "all masked"
        elif number % 5 != 3:
            assert (group["reason"] == "equal rewards") == (len(rewards) == 1)
    assert None in reasons.values()


def test_whether_a_step_taught_is_unknown_until_it_is_trained(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder / "mixed", tmp_path / "mixed")
    before = [get(tmp_path, f"run/mixed/step/{number}")["groups"] for number in (2, 3)]
    update_path(run, 3).unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < 3))
    groups = get(tmp_path, "run/mixed/step/3")["groups"]
    reasons = {(group["taught"], group["reason"]) for group in groups}
    assert reasons == {(None, "not trained yet"), (False, "replaced by another group")}
    position = next(group["position"] for group in groups if group["taught"] is None)
    assert get(tmp_path, f"run/mixed/step/3/episode/{position}/0/0")["taught"] is None
    assert get(tmp_path, "run/mixed/step/2")["groups"] == before[0]
    # An earlier release recorded no updates, but the metrics of each step that it trained.
    shutil.rmtree(run / "updates")
    (run / "metrics.jsonl").write_text("".join(lines))
    for number, groups in zip((2, 3), before, strict=True):
        shown = get(tmp_path, f"run/mixed/step/{number}")["groups"]
        assert [group["taught"] for group in shown] == [group["taught"] for group in groups]


def test_each_token_has_its_numbers_at_its_place(folder: Path) -> None:
    checked = 0
    for record in read_groups(table_path(folder / "mixed", 1)):
        groups = get(folder, "run/mixed/step/1")["groups"]
        position = next(group["position"] for group in groups if group["draw"] == record.group.draw)
        update = read_update(update_path(folder / "mixed", 1))[record.group.draw]
        for played in record.group.episodes:
            shown = get(folder, f"run/mixed/step/1/episode/{position}/{played.member}/{played.attempt}")
            expected: dict[tuple[int, int], tuple[int, float, float]] = {}
            for sequence in update.sequences:
                if sequence.member != played.member:
                    continue
                tokens = list[tuple[int, int]]()  # turn and place in its completion, for each token of the sequence
                path = [sequence.turn]
                while (parent := played.turns[path[0]].parent) is not None:
                    path.insert(0, parent)
                for index in path:
                    tokens += [(-1, -1)] * len(played.turns[index].prompt)
                    tokens += [(index, place) for place in range(len(played.turns[index].completion))]
                places = [tokens[target + 1] for target in np.flatnonzero(sequence.mask)]
                sampled = [played.turns[index].logprobs[place] for index, place in places]
                logprobs = sequence.find_logprobs(np.array(sampled, np.float32))
                for place, advantage, logprob in zip(places, sequence.advantages, logprobs, strict=True):
                    expected[place] = (sequence.position, float(advantage), float(logprob))
            for index, (each, recorded) in enumerate(zip(shown["turns"], played.turns, strict=True)):
                assert each["completion"] == recorded.completion.tolist()
                assert each["prompt"] == recorded.prompt.tokens.tolist()
                flags = np.zeros(len(recorded.completion), np.bool_)
                for start, end in each["sampled"]:
                    flags[start:end] = True
                assert flags.tolist() == recorded.sampled_mask.tolist()
                assert each["logprobs"] == pytest.approx(recorded.logprobs.tolist(), abs=1e-5)
                for place in range(len(recorded.completion)):
                    if (index, place) in expected:
                        datum, advantage, logprob = expected.pop((index, place))
                        assert each["datum"] == datum
                        assert each["advantages"][place] == pytest.approx(advantage, abs=1e-5)
                        assert each["trainer_logprobs"][place] == pytest.approx(logprob, abs=1e-5)
                        checked += 1
                    else:
                        assert each["advantages"][place] is None
            assert not expected
    assert checked > 100


def test_the_messages_of_a_branch_are_those_after_its_parent(folder: Path) -> None:
    shown = get(folder, "run/mixed/step/1/episode/0/0/0")
    roles = [[message["role"] for message in each["messages"]] for each in shown["turns"]]
    assert roles[0] == ["system", "user", "assistant"]
    assert roles[1] == roles[2] == ["user", "assistant"]
    assert [each["parent"] for each in shown["turns"]] == [None, 0, 0, None]
    assert shown["turns"][3]["messages"][2]["tool_calls"][0]["name"] == "look"
    assert shown["turns"][3]["messages"][-1]["content"].startswith("Well, ")


def test_a_group_tells_where_its_replies_fork(folder: Path) -> None:
    replies = get(folder, "run/mixed/step/1/group/0")["replies"]
    branches = [message["branch"] for message in replies[0]["messages"] if "branch" in message]
    assert branches == ["continues turn 1", "new segment"]


def test_a_group_shows_the_shared_prompt_once(folder: Path) -> None:
    group = get(folder, "run/mixed/step/1/group/0")
    assert [message["role"] for message in group["prompt"]] == ["system", "user"]
    assert {reply["messages"][0]["role"] for reply in group["replies"]} == {"assistant"}
    assert len(group["replies"]) == len(group["members"]) + len(group["failed_attempts"])


def test_a_failure_shows_its_error(folder: Path) -> None:
    errors = {
        member["error"]
        for number in (1, 2, 3)
        for group in get(folder, f"run/mixed/step/{number}")["groups"]
        for member in [*group["members"], *group["failed_attempts"]]
        if member["status"] == "failed"
    }
    assert all("the grader of task-" in error for error in errors)


def test_metrics_and_header_are_those_of_the_files(folder: Path) -> None:
    lines = read_metrics(folder / "mixed" / "metrics.jsonl")
    metrics = get(folder, "run/mixed/metrics")
    assert metrics["step"] == [step for step, _ in lines]
    name = "env/words/reward/mean"
    assert metrics["metrics"][name] == [values.get(name) for _, values in lines]
    header = get(folder, "run/mixed")
    assert header["reward"] == [lines[0][1][name], lines[-1][1][name]]
    assert (header["status"], header["live"], header["step"], header["steps"]) == ("completed", False, 3, 3)
    assert ["batch.groups", "5", "python"] in header["config"]
    assert header["steps_recorded"] == [1, 2, 3]


def test_the_best_step_has_the_best_value_of_the_metric_that_selects_weights(tmp_path: Path) -> None:
    values = {0: 0.25, 10: 0.75, 20: 0.5, 30: 0.75}
    for name, best, step in (
        ("rewards", {}, 10),
        ("losses", {"metric": "optim/tokens", "lower_is_better": True}, 0),
        ("other", {"metric": "time/step_s"}, None),
    ):
        run = write_run(tmp_path / name, steps=1, settings={"best": best})
        lines = [{"step": step, "eval/all/reward/mean": value, "optim/tokens": value} for step, value in values.items()]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"step": 31}]))
        assert get(tmp_path, f"run/{name}")["best_step"] == step
        (run / "checkpoints.jsonl").write_text('{"step": 20, "state": "a", "sampler": "b", "expires": null}\n')
        assert get(tmp_path, f"run/{name}")["best_step"] == (None if step is None else 20)  # it has weights


def test_each_value_of_a_list_has_the_origin_of_its_line(tmp_path: Path) -> None:
    write_run(tmp_path / "lists", steps=1, settings={"sampling": {"stop": ["a  # b", "c"]}, "seed": 3})
    config = {name: (value, origin) for name, value, origin in get(tmp_path, "run/lists")["config"]}
    assert config["sampling.stop.0"] == ('"a  # b"', "python")
    assert config["sampling.stop.1"] == ('"c"', "python")
    assert config["seed"] == ("3", "python")
    assert config["epochs"] == ("null", "default")
    assert config["envs.arithmetic.args"] == ("{}", "default")


def test_tags_are_those_of_the_tracker(tmp_path: Path) -> None:
    tags = ["first try", "no", "a  # b", "4", "[x]"]
    env = {"arithmetic": {"args": {"terms": [2, 3]}}}
    write_run(tmp_path / "plain", steps=1, settings={"envs": env})
    write_run(tmp_path / "tagged", steps=1, settings={"track": {"wandb": {"project": "p", "tags": tags}}})
    nested = write_run(tmp_path / "nested", steps=1) / "config.yaml"
    nested.write_text(nested.read_text() + "track:\n  mine:\n    tags: [mine]\n  wandb:\n    other:\n      tags: [x]\n")
    runs = {row["id"]: row["tags"] for row in get(tmp_path, "runs")["runs"]}
    assert runs == {"plain": [], "tagged": tags, "nested": []}


def test_tasks_list_each_episode_once(folder: Path) -> None:
    episodes = get(folder, "run/mixed/tasks")["episodes"]
    recorded = [
        [
            "step",
            step,
            group["env"],
            group["task"],
            row["status"],
            position,
            row["member"],
            row["attempt"],
            row["reward"],
        ]
        for step in (1, 2, 3)
        for position, group in enumerate(get(folder, f"run/mixed/step/{step}")["groups"])
        for row in group["members"]
    ]
    assert sorted(row[:8] for row in episodes if row[0] == "step") == sorted(row[:8] for row in recorded)
    assert all(row in recorded for row in episodes if row[0] == "step")
    assert get(folder, "run/mixed/evaluations")["episodes"] == [row for row in episodes if row[0] == "evaluation"]


def test_a_search_finds_text_in_replies_only(folder: Path) -> None:
    assert get(folder, "run/mixed/step/1/search", q="be brief")["matches"] == []
    assert get(folder, "run/mixed/step/1/search", q="")["matches"] == []
    found = get(folder, "run/mixed/step/1/search", q="WELL, ")["matches"]
    groups = get(folder, "run/mixed/step/1")["groups"]
    assert len(found) == sum(m["turns"] == 4 for g in groups for m in [*g["members"], *g["failed_attempts"]])


@pytest.mark.parametrize(
    "path",
    [
        "",
        "runs/x",
        "run",
        "run/none",
        "run/mixed/step/99",
        "run/mixed/step/-1",
        "run/mixed/step/1/group/99",
        "run/mixed/step/1/episode/0/99/0",
        "run/mixed/step/1/episode/0/0",
        "run/mixed/step/one",
        "run/..%2f..%2fetc",
        "run/mixed/step/" + "9" * 400,
        "run/mixed/evaluation/1",
        "run/mixed/nothing",
    ],
)
def test_a_page_that_does_not_exist_is_an_error_of_one_line(folder: Path, path: str) -> None:
    with pytest.raises(UsageError) as error:
        Library([folder]).respond(path, {})
    assert len(str(error.value).splitlines()) == 1


def test_a_damaged_table_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mixed", tmp_path / "mixed")
    path = table_path(tmp_path / "mixed", 2)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"step=000002/episodes\.parquet is damaged"):
        Library([tmp_path]).respond("run/mixed/step/2")
    assert get(tmp_path, "run/mixed/step/1")["groups"]


def test_a_run_without_updates_pieces_and_messages_is_shown_with_what_it_has(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", steps=1)
    path = table_path(run, 1)
    columns = pq.read_table(path)
    turns = columns.column("turns").combine_chunks()
    values = turns.flatten()
    names = [field.name for field in values.type if field.name != "messages"]
    fields = [values.field(name) for name in names]
    fields += [pa.array(["what is 2+2? "] * len(values)), pa.array(["four"] * len(values))]
    old = pa.StructArray.from_arrays(fields, names=[*names, "prompt_text", "completion_text"])
    lists = pa.ListArray.from_arrays(turns.offsets, old)
    pq.write_table(columns.set_column(columns.schema.get_field_index("turns"), "turns", lists), path)
    pieces_path(run).unlink()
    shown = get(tmp_path, "run/old/step/1/episode/0/0/0")
    assert [message["content"] for message in shown["turns"][0]["messages"]] == ["what is 2+2? ", "four"]
    assert (shown["turns"][0]["advantages"], shown["pieces"], shown["estimator"]) == (None, {}, None)
    assert get(tmp_path, "run/old/step/1/search", q="FOUR")["matches"]


def test_an_image_is_shown_in_its_message(tmp_path: Path) -> None:
    run = write_run(tmp_path / "pictures", steps=1)
    prompt = Prompt(np.array([5, -1, -1], np.int32), (Image(1, 2, b"\x89PNG", "png"),))
    messages: tuple[Message, ...] = (
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "image": "#0"}]},
        {"role": "assistant", "content": "yes"},
    )
    played = episode(1.0, turns=[replace(turn([1], [2]), prompt=prompt, messages=messages)])
    table.write(table_path(run, 1), [table.RecordedGroup(Group("e", "t", 0, (played,)), True, [played])])
    PieceWriter(pieces_path(run), piece).add([prompt.tokens, played.turns[0].completion])
    shown = get(tmp_path, "run/pictures/step/1/episode/0/0/0")["turns"][0]
    assert shown["images"] == ["data:image/png;base64,iVBORw=="]
    assert shown["messages"][0]["content"][1]["image"] == shown["images"][0]


def test_a_run_is_live_while_its_lock_is_held_and_the_page_takes_no_lock(tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", steps=1, status="running")
    assert get(tmp_path, "runs")["runs"][0]["status"] == "killed"
    with (run / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shown = get(tmp_path, "runs")["runs"][0]
        assert (shown["status"], shown["live"]) == ("running", True)
    assert get(tmp_path, "runs")["runs"][0]["status"] == "killed"


def test_a_lock_is_found_where_the_list_names_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, number = write_run(tmp_path / "live", steps=1, status="running"), 4321
    (run / "lock").write_text(f"{number}\n")
    file = (run / "lock").stat().st_ino
    monkeypatch.setattr(run_locks, "_LOCKS", tmp_path / "locks")
    for process, name, status in (
        (number, f"00:99:{file}", "running"),
        (1, f"00:99:{file}", "killed"),
        (number, "00:99:1", "killed"),
    ):
        (tmp_path / "locks").write_text(
            f"1: FLOCK  ADVISORY  WRITE {process} {name} 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 7 00:01:2 0 EOF\n"
        )
        assert get(tmp_path, "runs")["runs"][0]["status"] == status


def test_a_mean_of_zero_over_environments_is_a_mean(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder / "mixed", tmp_path / "mixed")
    names = {"env/all/reward/mean": 0.0, "env/a/reward/mean": -0.5, "env/b/reward/mean": 0.3}
    (run / "metrics.jsonl").write_text(f"{json.dumps({'step': 1, **names})}\n")
    assert get(tmp_path, "runs")["runs"][0]["reward"] == [None, 0.0]


def test_the_reward_of_a_run_starts_after_its_warm_start(folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(folder / "mixed", tmp_path / "mixed"))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub("^warm_start: null.*$", "warm_start:\n  steps: 200", config, flags=re.M))
    lines: list[dict[str, float]] = [{"step": step, "env/warm_start/tokens/mean": 2.0} for step in range(1, 4001)]
    lines += [{"step": 4001, "env/words/reward/mean": 0.25}, {"step": 4002, "env/words/reward/mean": 0.5}]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert (run / "metrics.jsonl").stat().st_size > 1 << 17  # more than is read at each end
    (row,) = get(tmp_path, "runs")["runs"]
    assert row["reward"] == [0.25, 0.5]
    assert row["step"] == 4002


def test_the_files_of_a_trial_are_read_inside_its_folder_only(tmp_path: Path) -> None:
    trial = tmp_path / "trial"
    (trial / "agent").mkdir(parents=True)
    (trial / "result.json").write_text("{}")
    (trial / "agent" / "pane.txt").write_text("$ ls\n")
    (tmp_path / "secret.txt").write_text("secret")
    (trial / "link.txt").symlink_to(tmp_path / "secret.txt")
    run = write_run(tmp_path / "runs" / "trials", steps=1)
    played = replace(episode(1.0), info={"trial": str(trial)})
    table.write(table_path(run, 1), [table.RecordedGroup(Group("e", "t", 0, (played,)), True, [played])])
    place = "run/trials/step/1/episode/0/0/0"
    files = [file["path"] for file in get(tmp_path / "runs", place)["files"]]
    assert files == ["agent/pane.txt", "result.json"]
    assert get(tmp_path / "runs", f"{place}/file", path="agent/pane.txt") == {"text": "$ ls\n", "truncated": False}
    for path in ("../secret.txt", "link.txt", "/etc/passwd", "", "agent", "none"):
        with pytest.raises(UsageError, match="has no file"):
            get(tmp_path / "runs", f"{place}/file", path=path)


@pytest.mark.parametrize("name", ["long" * 2000, "a\0b", "", 7])
def test_a_trial_that_no_folder_can_be_has_no_files(name: object) -> None:
    assert list_files({"trial": name}) == []


def test_an_unreadable_run_is_listed_with_its_reason(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mixed", tmp_path / "mixed")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    rows = {row["id"]: row for row in get(tmp_path, "runs")["runs"]}
    assert rows["broken"]["status"] == "unreadable"
    assert "run.json is damaged" in rows["broken"]["reason"]
    assert rows["mixed"]["status"] == "completed"


def test_a_folder_of_another_user_does_not_hide_the_runs_beside_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "mixed", tmp_path / "mixed")
    shutil.copytree(folder / "mixed", tmp_path / "private")
    stat, is_open = Path.stat, os.access

    def deny(path: Path, **options: bool) -> os.stat_result:  # the tests may run as root, who may read all
        if path.parent.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", deny)
        patched.setattr(os, "access", lambda path, mode: path.name != "private" and is_open(path, mode))
        library = Library([tmp_path])
        rows = {row["id"]: row for row in json.loads(library.respond("runs"))["runs"]}
        assert rows["private"]["status"] == "unreadable"
        assert "Permission denied" in rows["private"]["reason"]
        assert rows["mixed"]["status"] == "completed"
    rows = {row["id"]: row for row in json.loads(library.respond("runs"))["runs"]}
    assert rows["private"]["status"] == "completed"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.json", '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        ("run.json", '{"status": ["x"], "started": "today", "identity": {"envs": 7, "model": []}, "error": {}}'),
        ("run.json", '{"identity": 5, "findings": [1]}'),
        ("usage.json", '{"sampled_tokens": "many", "trained_tokens": 1e999}'),
        ("metrics.jsonl", '{"step": 1, "env/words/reward/mean": "x"}\n'),
        ("config.yaml", "steps: &steps [*steps]"),
        (
            "config.yaml",
            "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
        ),
    ],
)
def test_values_of_unexpected_types_hide_no_other_run(folder: Path, tmp_path: Path, name: str, text: str) -> None:
    shutil.copytree(folder / "mixed", tmp_path / "mixed")
    shutil.copytree(folder / "mixed", tmp_path / "odd")
    (tmp_path / "odd" / name).write_text(text)
    rows = {row["id"]: row for row in get(tmp_path, "runs")["runs"]}
    assert rows["mixed"]["status"] == "completed"
    assert isinstance(rows["odd"]["envs"], list)
    assert isinstance(rows["odd"]["reason"], str | None)
    with suppress(UsageError):
        get(tmp_path, "run/odd")


@pytest.mark.parametrize("text", ["a: [", "track:\n  wandb:\n    tags: [a: b: c]\n", "\x00", "- 1\n"])
def test_a_damaged_configuration_is_named_beside_what_can_be_read(folder: Path, tmp_path: Path, text: str) -> None:
    run = Path(shutil.copytree(folder / "mixed", tmp_path / "mixed"))
    before = {name: get(tmp_path, f"run/mixed{name}") for name in ("", "/metrics", "/tasks", "/step/1")}
    assert before[""]["damaged"] is None
    (run / "config.yaml").write_text(text)
    after = {name: get(tmp_path, f"run/mixed{name}") for name in before}
    changed = {name for name, value in after[""].items() if value != before[""][name]}
    assert changed == {"config", "steps", "damaged"}
    assert "config.yaml" in after[""]["damaged"] and after[""]["config"] == []
    assert [after[name] for name in after if name] == [before[name] for name in before if name]
    (row,) = get(tmp_path, "runs")["runs"]
    assert (row["status"], row["reward"]) == ("completed", before[""]["reward"])
    assert ("tags: not valid" if "tags" in text else "config.yaml is damaged: its end is missing") in row["damaged"]
    (run / "config.yaml").unlink()
    (run / "config.yaml").mkdir()
    (row,) = get(tmp_path, "runs")["runs"]
    assert row["status"] == "completed" and "config.yaml" in row["damaged"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", f"steps: {'9' * 400}\n"),
        ("metrics.jsonl", '{"step": "x", "env/all/reward/mean": "x", "usage/usd": "x"}\n'),
    ],
)
def test_the_list_of_runs_has_numbers_only_where_they_are_expected(
    folder: Path, tmp_path: Path, name: str, text: str
) -> None:
    run = Path(shutil.copytree(folder / "mixed", tmp_path / "mixed"))
    (run / name).write_text(text)
    (row,) = get(tmp_path, "runs")["runs"]
    assert row["status"] == "completed"
    for value in (row["step"], row["steps"], row["usd"], *(row["reward"] or ())):
        assert value is None or (isinstance(value, int | float) and value < 1e9)


def test_a_turn_that_continues_itself_is_damage(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mixed", tmp_path / "mixed")
    group, member = next(
        (group, member)
        for group in get(folder, "run/mixed/step/1")["groups"]
        for member in group["members"]
        if member["turns"] > 1 and member["advantage"]
    )
    path = table_path(tmp_path / "mixed", 1)
    damaged = [
        replace(row, group=replace(row.group, episodes=episodes), attempts=episodes)
        for row in table.read_table(path)
        for episodes in [tuple(_continue_first_turn(each) for each in row.group.episodes)]
    ]
    table.write(path, damaged)
    with pytest.raises(UsageError, match="mixed is damaged: ValueError: turn 0 continues turn 0"):
        get(tmp_path, f"run/mixed/step/1/episode/{group['position']}/{member['member']}/{member['attempt']}")


def _continue_first_turn(played: Episode) -> Episode:
    return replace(played, turns=tuple(replace(turn, parent=0) for turn in played.turns))


def test_a_search_shows_published_results_beside_its_records(tmp_path: Path) -> None:
    run = write_run(tmp_path / "search", steps=1)
    options = {  # as the environments record their defaults
        "erdos": {"n_points": None, "max_points": 1000, "exact_n": False},
        "circle_packing": {"circles": 26, "region": "square"},
    }
    for problem, values in options.items():
        record = {"problem": problem, "options": values, "symbol": "C5", "value": 0.4, "values": [0.5]}
        (run / "artefacts" / problem).mkdir(parents=True)
        (run / "artefacts" / problem / "1.record.json").write_text(json.dumps(record))
    searches = get(tmp_path, "run/search/discovery")["searches"]
    assert ["the best published" in search["known"] for search in searches] == [True, True]


def test_a_search_of_an_old_run_that_goes_on_finds_its_texts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "old", steps=1)
    path = table_path(run, 1)
    rows = pq.read_table(path).to_pylist()
    for place, row in enumerate(rows):
        row["turns"] = [{**turn, "completion_text": f"answer {place}"} for turn in row["turns"]]
    pq.write_table(pa.Table.from_pylist(rows), path)
    PieceWriter(pieces_path(run), piece).add([np.array([9999], np.int32)])
    matches = get(tmp_path, "run/old/step/1/search", q="ANSWER")["matches"]
    assert {match[3] for match in matches} == {f"answer {place}" for place, row in enumerate(rows) if row["turns"]}
    assert [match[:3] for match in matches] == sorted(match[:3] for match in matches)


def test_evaluations_far_from_the_newest_step_are_in_the_header(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder / "mixed", tmp_path / "mixed")
    lines = [{"step": step, "env/words/reward/mean": 0.5, "text": "x" * 1000} for step in range(1, 1000)]
    lines[200]["eval/words/reward/mean"], lines[500]["eval/words/reward/mean"] = 0.25, 0.75
    (run / "evaluations").mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (row,) = get(tmp_path, "runs")["runs"]
    assert row["evaluation"] == {"metric": "reward", "start": 0.25, "now": 0.75}
    assert row["step"] == 999


def test_a_number_that_json_does_not_support_is_null(tmp_path: Path) -> None:
    run = write_run(tmp_path / "odd", steps=1)
    played = replace(episode(1.0), metrics={"loss": float("nan")}, info={"best": float("inf")})
    table.write(table_path(run, 1), [table.RecordedGroup(Group("e", "t", 0, (played,)), True, [played])])
    shown = get(tmp_path, "run/odd/step/1/episode/0/0/0")
    assert (shown["metrics"], shown["info"]) == ({"loss": None}, {"best": None})
    assert b"NaN" not in Library([tmp_path]).respond("run/odd/step/1")
