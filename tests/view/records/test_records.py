"""Records of other tools, written by those tools, as data of the page."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlkit.errors import UsageError
from rlkit.metrics.intervals import estimate_mean
from rlkit.view.library import Library, find_reader
from rlkit.view.records.cookbook import CookbookReader
from rlkit.view.records.reader import Place, RecordReader, Step
from rlkit.view.run_reader import RunReader
from tests.view.records.cookbook_run import QUESTION, write_run

DATA = Path(__file__).parents[2] / "data" / "view"
EVALUATION: Step = ("evaluation", 0)
LOGS = ("inspect.eval", "verifiers_traces", "verifiers_results")
GROUP = {"position", "draw", "env", "task", "taught", "reason", "estimator", "baseline", "members", "failed_attempts"}
MEMBER = {"member", "attempt", "status", "reward", "advantage", "tokens", "turns", "seconds", "cut", "masked"} | {
    "versions",
    "error",
    "metrics",
}
RUN = {"id", "name", "kind", "path", "status", "live", "reason", "started", "updated", "step", "steps", "model"} | {
    *("envs", "tags", "damaged", "reward", "evaluation", "tokens", "usd"),
}
HEADER = {"config", "findings", "checkpoints", "best_step", "versions", "steps_recorded", "evaluations"}
TURN = {"parent", "version", "stop", "reward", "seconds", "messages", "prompt", "completion", "sampled", "logprobs"} | {
    *("trainer_logprobs", "advantages", "datum", "images"),
}
EPISODE = {"step", "position", "draw", "env", "task", "member", "attempt", "status", "reward", "error", "seconds"} | {
    *("metrics", "info", "taught", "reason", "estimator", "baseline", "kind", "neighbours", "turns", "pieces"),
    *("special", "files", "view"),
}


def load(path: Path) -> RecordReader:
    reader = find_reader(path)
    assert reader is not None
    return reader


@pytest.fixture(scope="session")
def cookbook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "cookbook"
    write_run(folder)
    return folder


@pytest.fixture(params=[*LOGS, "cookbook"])
def record(request: pytest.FixtureRequest, cookbook: Path, tmp_path: Path) -> Path:
    """A copy of a record of each format."""
    source = cookbook if request.param == "cookbook" else DATA / request.param
    copy = shutil.copytree if source.is_dir() else shutil.copy
    return Path(copy(source, tmp_path / source.name))


def read_all(reader: RecordReader) -> dict[str, Any]:
    """Everything that the page can show."""
    read = dict[str, Any](
        summary=reader.summary(), run=reader.run(), metrics=reader.metrics(), tasks=reader.tasks("step", "evaluation")
    )
    for step in reader.list_steps():
        read[str(step)] = reader.step(step)
        for group in reader.step(step)["groups"]:
            position = group["position"]
            read[str((step, position))] = reader.group(step, position)
            for member in group["members"]:
                place = (position, member["member"], member["attempt"])
                read[str((step, place))] = reader.episode(step, place)
    return read


def test_records_have_the_fields_of_the_page(record: Path) -> None:
    read = read_all(load(record))
    json.dumps(read, allow_nan=False)
    assert set(read["summary"]) == RUN
    assert set(read["run"]) == RUN | HEADER
    step = load(record).list_steps()[0]
    group = read[str(step)]["groups"][0]
    assert set(group) >= GROUP
    assert set(group["members"][0]) == MEMBER
    shown = read[str((step, 0))]
    assert set(shown) >= GROUP | {"prompt", "replies"}
    assert [reply["member"] for reply in shown["replies"]] == [member["member"] for member in group["members"]]
    episode = read[str((step, (0, 0, 0)))]
    assert set(episode) >= EPISODE
    assert set(episode["turns"][0]) == TURN
    assert {len(row) for row in read["tasks"]["episodes"]} == {9}


def test_neighbours_lead_through_all_episodes_of_a_step(record: Path) -> None:
    reader = load(record)
    step = reader.list_steps()[0]
    place, places = (0, 0, 0), list[tuple[int, int, int]]()
    while place is not None:
        places.append(place)
        place = reader.episode(step, place)["neighbours"]["next"]
    groups = reader.step(step)["groups"]
    assert places == [(group["position"], member["member"], 0) for group in groups for member in group["members"]]
    assert reader.episode(step, places[1])["neighbours"]["previous"] == places[0]


def test_a_search_finds_text_in_replies_only(record: Path) -> None:
    library = Library([record])
    matches = list[list[Any]]()
    for kind, number in load(record).list_steps():
        path = f"run/{record.name}/{kind}/{number}/search"
        matches += json.loads(library.respond(path, {"q": "4"}))["matches"]
        for query in ("", "What is", "no text of a reply"):
            assert json.loads(library.respond(path, {"q": query})) == {"matches": []}
    assert matches and all("4" in excerpt for *_, excerpt in matches)


@pytest.mark.parametrize(
    ("value", "shown"),
    [("NaN", None), ("-Infinity", None), ('"\\ud83d"', "\ud83d"), ("[" * 300 + "1" + "]" * 300, None), ('"é"', "é")],
    ids=["no number", "infinite", "half a character", "300 lists", "not ASCII"],
)
def test_values_that_json_lacks_or_that_are_rare_reach_the_page(tmp_path: Path, value: str, shown: Any) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / "results.jsonl").write_text(f'{{"example_id": 1, "reward": 1.0, "answer": [{value}]}}\n')
    episode = json.loads(Library([tmp_path]).respond(f"run/{tmp_path.name}/evaluation/0/episode/0/0/0"))
    (answer,) = episode["info"]["answer"]
    if value[0] == "[":
        assert json.dumps(answer) == value
    else:
        assert answer == shown


def test_epochs_of_an_inspect_sample_are_a_group() -> None:
    name = "inspect.eval"
    reader = load(DATA / name)
    assert reader.summary() | {"updated": None, "started": None} == {
        **{"id": name, "name": name, "kind": "inspect", "path": str(DATA / name), "status": "completed", "live": False},
        **{"reason": None, "updated": None, "started": None, "steps": None, "model": "mockllm/model", "envs": ["sums"]},
        **{"step": 0, "tags": [], "damaged": None, "reward": None, "tokens": 80, "usd": None},
        "evaluation": {"metric": "match accuracy", "start": None, "now": pytest.approx(5 / 6)},
    }
    run = reader.run()
    assert (run["steps_recorded"], run["evaluations"], run["versions"]) == ([], [0], {"inspect_ai": "0.3.285"})
    metrics = reader.metrics()
    assert metrics["step"] == [0]
    interval = estimate_mean([1, 0.5, 1])
    assert metrics["metrics"] == {
        "eval/sums/reward/mean": [pytest.approx(5 / 6)],
        "eval/sums/reward/mean/low": [interval.low],
        "eval/sums/reward/mean/high": [interval.high],
    }
    groups = {group["task"]: group for group in reader.step(EVALUATION)["groups"]}
    rewards = {task: [member["reward"] for member in group["members"]] for task, group in groups.items()}
    assert rewards == {"tool": [1, 1], "picture": [1, 0], "plain": [1, 1], "fails": [None, None]}
    assert {member["status"] for member in groups["fails"]["members"]} == {"failed"}
    assert groups["tool"]["members"][0]["tokens"] == 6


def test_a_copy_of_an_inspect_log_keeps_its_duration(tmp_path: Path) -> None:
    log = Path(shutil.copyfile(DATA / "inspect.eval", tmp_path / "inspect.eval"))  # with the time of today
    summary = load(log).summary()
    assert summary["updated"] == summary["started"]  # it took less than a second


def test_messages_of_an_inspect_sample_have_thinking_images_and_tool_calls() -> None:
    reader = load(DATA / "inspect.eval")
    picture = reader.group(EVALUATION, 1)
    text, image = picture["prompt"][0]["content"]
    assert text == {"type": "text", "text": "Which colour has the picture?"}
    assert image["type"] == "image" and image["image"].startswith("data:image/png;base64,iVBOR")
    assert [reply["messages"][0]["content"][0]["text"] for reply in picture["replies"]] == ["red", "blue"]
    assert picture["replies"][0]["messages"][0]["thinking"] == "A red pixel?"
    first, second = reader.episode(EVALUATION, (0, 0, 0))["turns"]
    (call,) = first["messages"][-1]["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"x": 2, "y": 3})
    assert (second["parent"], second["messages"][0]["role"], second["messages"][0]["content"]) == (0, "tool", "5")
    assert second["messages"][0]["tool_call_id"] == call["id"]
    assert reader.episode(EVALUATION, (2, 0, 0))["turns"][0]["stop"] == "max_tokens"
    failed = reader.episode(EVALUATION, (3, 0, 0))
    assert "Traceback" in failed["error"] and "the sandbox died" in failed["error"]
    assert "\n" not in reader.step(EVALUATION)["groups"][3]["members"][0]["error"]


def rewrite_log(source: Path, target: Path, keep: Callable[[str], bool], method: int = zipfile.ZIP_DEFLATED) -> None:
    """Pack the entries of a log anew, as versions of inspect before Zstandard do."""
    data = source.read_bytes()
    with zipfile.ZipFile(source) as log, zipfile.ZipFile(target, "w", method) as copy:
        for entry in filter(lambda entry: keep(entry.filename), log.infolist()):
            start = entry.header_offset + 30 + sum(data[entry.header_offset + 26 : entry.header_offset + 30 : 2])
            packed = io.BytesIO(data[start : start + entry.compress_size])
            copy.writestr(entry.filename, zstandard.ZstdDecompressor().stream_reader(packed).read())


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_compression_of_an_inspect_log_makes_no_difference(tmp_path: Path, method: int) -> None:
    rewrite_log(DATA / "inspect.eval", tmp_path / "inspect.eval", lambda name: True, method)
    ours, theirs = (read_all(load(path / "inspect.eval")) for path in (tmp_path, DATA))
    for read in (ours, theirs):
        for name in ("summary", "run"):
            read[name] |= {"path": None, "updated": None}
    assert ours == theirs


def test_inspect_log_in_progress_is_live_until_nothing_is_written(tmp_path: Path) -> None:
    log = tmp_path / "inspect.eval"
    rewrite_log(DATA / "inspect.eval", log, lambda name: name not in ("header.json", "summaries.json"))
    reader = load(log)
    assert (reader.summary()["status"], reader.summary()["live"]) == ("running", True)
    assert len(reader.step(EVALUATION)["groups"]) == 4
    os.utime(log, (0, 0))
    assert (reader.summary()["status"], reader.summary()["live"]) == ("interrupted", False)


@pytest.mark.parametrize("name", ["verifiers_traces", "verifiers_results"])
def test_a_record_that_is_written_again_is_live_again(tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(DATA / name, tmp_path / name))
    (rollouts,) = [path for path in map(folder.joinpath, ("traces.jsonl", "results.jsonl")) if path.exists()]
    rollouts.write_text("".join(rollouts.read_text().splitlines(keepends=True)[:-1]))  # one is missing
    os.utime(rollouts, (0, 0))
    library = Library([tmp_path])
    assert [run["status"] for run in library.summaries()["runs"]] == ["interrupted"]
    os.utime(rollouts)
    assert [run["status"] for run in library.summaries()["runs"]] == ["running"]


def test_verifiers_traces_are_an_evaluation() -> None:
    reader = load(DATA / "verifiers_traces")
    summary = reader.summary()
    assert (summary["kind"], summary["status"], summary["model"], summary["tokens"]) == (
        "verifiers",
        "completed",
        "m",
        12,
    )
    assert summary["evaluation"] == {"metric": "reward", "start": None, "now": 0.75}
    groups = {group["task"]: group["members"] for group in reader.step(EVALUATION)["groups"]}
    assert {task: [member["reward"] for member in members] for task, members in groups.items()} == {
        **{"sum": [1, 0], "tool": [1, 1], "rejected": [None, None]}
    }
    assert [member["status"] for member in groups["sum"]] == ["completed", "truncated"]
    assert [member["cut"] for member in groups["sum"]] == [False, True]
    assert groups["sum"][0]["metrics"] == {"characters": 27, "correct": 1}
    assert groups["rejected"][0]["error"].startswith("ProviderError: upstream 400")
    group = reader.group(EVALUATION, 0)
    assert [message["role"] for message in group["prompt"]] == ["system", "user"]
    assert group["replies"][0]["messages"] == [
        {"role": "assistant", "content": "<script>alert(1)</script> 4", "thinking": "two and two", "turn": 0}
    ]
    first, second = reader.episode(EVALUATION, (1, 0, 0))["turns"]
    assert (first["stop"], second["stop"], first["parent"], second["parent"]) == ("tool_calls", "stop", None, 0)
    assert first["seconds"] > 0
    assert [message["role"] for message in second["messages"]] == ["tool", "assistant"]
    (call,) = first["messages"][-1]["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("add", {"x": 2, "y": 3})


def change_lines(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_verifiers_traces_of_a_training_run_are_its_steps(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "verifiers_traces", tmp_path / "run"))
    work = {"type": "train", "step": 3, "policy": {"start": 1, "end": 2}}
    change_lines(folder / "traces.jsonl", lambda row: row["run"].update(type="train", work=work))
    reader = load(folder)
    assert (reader.run()["steps_recorded"], reader.run()["evaluations"]) == ([3], [])
    assert reader.step(("step", 3))["groups"][0]["members"][0]["versions"] == [1, 2]
    with pytest.raises(UsageError, match="has no evaluation 3"):
        reader.step(("evaluation", 3))


def test_branches_of_verifiers_traces_keep_their_parents(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "verifiers_traces", tmp_path / "run"))

    def branch(row: dict[str, Any]) -> None:
        nodes = row["traces"][0]["nodes"]
        if len(nodes) == 5:
            nodes += [{"parent": 2, "sampled": True, "message": {"role": "assistant", "content": "again"}}]

    change_lines(folder / "traces.jsonl", branch)
    turns = load(folder).episode(EVALUATION, (1, 0, 0))["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, 0]
    assert [message["content"] for message in turns[2]["messages"]] == ["again"]


def test_results_of_older_verifiers_are_an_evaluation() -> None:
    reader = load(DATA / "verifiers_results")
    summary = reader.summary()
    assert (summary["status"], summary["model"], summary["envs"]) == ("completed", "m", ["sums"])
    assert (
        summary["evaluation"]["now"] == json.loads((DATA / "verifiers_results/metadata.json").read_text())["avg_reward"]
    )
    assert reader.run()["versions"] == {"verifiers": "0.3.1"}
    sums, tools, rejected = reader.step(EVALUATION)["groups"]
    assert [member["status"] for member in sums["members"]] == ["truncated", "completed"]
    assert rejected["members"][0]["error"].startswith("ModelError() -> BadRequestError")
    assert tools["members"][0]["metrics"]["total_tool_calls"] == 1
    first, second = reader.episode(EVALUATION, (1, 0, 0))["turns"]
    (call,) = first["messages"][-1]["tool_calls"]
    assert (call["id"], call["name"], json.loads(call["arguments"])) == ("call-1", "add", {"x": 2, "y": 3})
    assert second["messages"][-1]["content"] == "The sum is 5"


def test_cookbook_run_has_curves_and_checkpoints(cookbook: Path) -> None:
    reader = load(cookbook)
    summary, run = reader.summary(), reader.run()
    assert (summary["kind"], summary["status"], summary["step"], summary["steps"]) == ("cookbook", "completed", 2, 2)
    assert (summary["reward"], summary["model"], summary["tokens"]) == ([0.25, 0.75], "m/small", 182)
    assert summary["evaluation"] == {"metric": "reward", "start": None, "now": 0.5}
    assert (run["steps_recorded"], run["evaluations"]) == ([0, 1], [0])
    assert run["checkpoints"] == [{"step": 2, "path": "tinker://w", "expires": None}]
    assert ["learning_rate", "0.0001", ""] in run["config"]
    metrics = reader.metrics()
    assert metrics["step"] == [0, 1]
    assert metrics["metrics"]["env/all/reward/mean"] == [0.25, 0.75]
    assert metrics["metrics"]["eval/test/reward/mean"] == [0.5, None]
    low, high = (metrics["metrics"][f"eval/test/reward/mean/{name}"] for name in ("low", "high"))
    assert low[0] < 0.5 < high[0] and low[1] is high[1] is None


def test_conversations_of_a_cookbook_log_belong_to_the_members_with_their_rewards(cookbook: Path) -> None:
    reader = load(cookbook)
    group = reader.group(("step", 0), 0)
    assert group["prompt"] == [{"role": "user", "content": QUESTION}]
    assert [member["reward"] for member in group["members"]] == [1, 0]
    assert [reply["messages"][0]["content"] for reply in group["replies"]] == ["4", "four"]
    unlogged = reader.group(("step", 0), 1)
    assert unlogged["prompt"] == [] and all(reply["messages"] == [] for reply in unlogged["replies"])
    assert (group["taught"], group["reason"], group["env"]) == (True, None, "sums")
    assert reader.step(EVALUATION)["groups"][0]["env"] == "test"
    assert reader.step(("step", 1))["groups"][0]["members"][0]["versions"] == [1, 1]


def test_conversations_of_a_cookbook_log_without_rewards_are_the_groups(cookbook: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cookbook, tmp_path / "run"))
    log = folder / "iteration_000000" / "train_logtree.json"
    log.write_text(log.read_text().replace('"reward"', '"other"'))
    group = load(folder).group(("step", 0), 0)
    assert [message["content"] for message in group["prompt"]] == [QUESTION, "four", QUESTION, "4"]


def test_groups_with_equal_rewards_did_not_teach(cookbook: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cookbook, tmp_path / "run"))
    change_lines(
        folder / "iteration_000000" / "train_rollout_summaries.jsonl", lambda row: row.update(total_reward=1.0)
    )
    group = load(folder).step(("step", 0))["groups"][0]
    assert (group["taught"], group["reason"]) == (False, "equal rewards")


def test_line_that_is_still_being_written_is_ignored(cookbook: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cookbook, tmp_path / "run"))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "env/all/rew')
    assert load(folder).metrics()["step"] == [0, 1]


def test_results_that_are_still_empty_are_a_run_without_episodes(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").touch()
    (tmp_path / "metadata.json").write_text('{"env_id": "sums", "num_examples": -1, "rollouts_per_example": 2}')
    summary = load(tmp_path).summary()
    assert (summary["status"], summary["evaluation"]["now"]) == ("running", None)


def test_other_paths_have_no_reader(tmp_path: Path) -> None:
    for name in ("run.json", "metrics.jsonl", "config.json"):
        (tmp_path / name).write_text("{}")
    assert isinstance(find_reader(tmp_path), RunReader)
    assert find_reader(tmp_path / "missing.eval") is None
    assert find_reader(tmp_path / "run.json") is None


@pytest.mark.parametrize("place", [(99, 0, 0), (-1, 0, 0), (0, 99, 0), (0, 0, 1)])
def test_missing_place_is_an_error(record: Path, place: Place) -> None:
    reader = load(record)
    with pytest.raises(UsageError, match=f"{record.name}.* has no member"):
        reader.episode(reader.list_steps()[0], place)
    with pytest.raises(UsageError, match=f"{record.name}.* has no group 99 in "):
        reader.group(reader.list_steps()[0], 99)
    with pytest.raises(UsageError, match=f"{record.name}.* has no evaluation 7"):
        reader.step(("evaluation", 7))


def files_of(record: Path) -> list[Path]:
    paths = [record] if record.is_file() else sorted(path for path in record.rglob("*") if path.is_file())
    return [path for path in paths if path.suffix in (".eval", ".json", ".jsonl")]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"PK\x03\x04", b"9" * 9_999]
)
def test_damaged_file_is_an_error_that_names_it_or_an_empty_record(record: Path, content: bytes) -> None:
    for path in files_of(record):
        original = path.read_bytes()
        path.write_bytes(content)
        try:
            json.dumps(read_all(load(record)), allow_nan=False)
        except UsageError as error:
            assert path.name in str(error) or "has no" in str(error)
        path.write_bytes(original)


HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.just("attachment://0"),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(max_size=3), children, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize(
    ("step", "done"),
    [(10**307, 0.01), (10**400, 0.5), (3, 5e-324)],
    ids=["many steps", "more than a float", "tiny share"],
)
def test_an_absurd_number_of_steps_is_unknown(tmp_path: Path, step: int, done: float) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "progress/done_frac": done}) + "\n")
    assert CookbookReader(tmp_path).run()["steps"] is None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_values_of_other_types_are_shown_as_missing(record: Path, data: st.DataObject) -> None:
    """Replace a random value of a random file by one of another type."""
    if record.is_file():
        with zipfile.ZipFile(DATA / record.name) as log:
            name = data.draw(st.sampled_from(sorted(log.namelist())))
        rewrite_entry(record, name, lambda value: mutate(value, data))
    else:
        path = data.draw(st.sampled_from(files_of(record)))
        original = path.read_text()
        lines = original.splitlines() if path.suffix == ".jsonl" else [original]
        number = data.draw(st.integers(0, len(lines) - 1))
        lines[number] = json.dumps(mutate(json.loads(lines[number]), data))
        path.write_text("\n".join(lines) + "\n")
    try:
        json.dumps(read_all(load(record))).encode()  # `respond` makes numbers that JSON does not have null
    except UsageError as error:
        assert str(record) in str(error)
    finally:
        if record.is_file():
            shutil.copy(DATA / record.name, record)
        else:
            path.write_text(original)


def rewrite_entry(log: Path, name: str, change: Callable[[Any], Any]) -> None:
    plain = log.with_suffix(".plain")
    rewrite_log(DATA / log.name, plain, lambda each: True, zipfile.ZIP_STORED)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(log, "w") as target:
        for each in source.namelist():
            value = source.read(each)
            target.writestr(each, json.dumps(change(json.loads(value))) if each == name else value)


def mutate(value: Any, data: st.DataObject) -> Any:
    """Replace a part of a JSON value at a random depth."""
    if isinstance(value, dict | list) and value and data.draw(st.integers(0, 5)):
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        copy = value.copy()
        copy[key] = mutate(value[key], data)
        return copy
    return data.draw(HOSTILE)


def test_entry_that_unpacks_to_too_much_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit.view.records.inspect.ENTRY_MAX_BYTES", 1_000)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        rewrite_log(DATA / "inspect.eval", tmp_path / "log.eval", lambda name: True, method)
        with pytest.raises(UsageError, match=r"log\.eval is damaged: header\.json: it has more than 1,000 bytes"):
            load(tmp_path / "log.eval").summary()
    with pytest.raises(UsageError, match="it has more than 1,000 bytes"):
        load(DATA / "inspect.eval").summary()


def test_truncated_inspect_log_is_an_error(tmp_path: Path) -> None:
    data = (DATA / "inspect.eval").read_bytes()
    for size in range(0, len(data), 997):
        (tmp_path / "log.eval").write_bytes(data[:size])
        with pytest.raises(UsageError, match=r"log\.eval is damaged"):
            read_all(load(tmp_path / "log.eval"))
