"""`env: rows`, through the configuration, as a user writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas
import pytest

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs
from rlkit.types import Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "rows.md").read_text()
ROWS = [{"question": f"Spell {word}", "answer": word, "hint": word[0]} for word in ("sun", "tree", "house")]


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("grade.py").write_text(
        "import rlkit\n"
        "def length(reply, answer): return rlkit.Outcome(0.5, {'length': float(len(answer))})\n"
        "def hint(reply, row): return float(reply.startswith(row['hint']))\n"
        "def short(reply): return 1.0\n"
    )


def tasks(**args: Any) -> list[Any]:
    settings = {"model": "simulated", "envs": {"table": {"env": "rows", "args": {"path": "data.jsonl", **args}}}}
    spec = load_config([], settings=settings).config.envs["table"]
    return list(load_envs("table", spec, field="envs.table", seed=0))  # type: ignore[call-overload]


def reply(text: str) -> Any:
    return type("Reply", (), {"text": text})()


def test_a_reply_equal_to_the_answer_is_rewarded() -> None:
    first, *_ = envs = tasks(prompt="question", answer="answer")
    assert len(envs) == 3
    assert first.prompt() == [{"role": "user", "content": "Spell sun"}]
    assert (first.grade(reply(" sun\n")), first.grade(reply("moon")), first.gold) == (1.0, 0.0, "sun")


def test_a_column_of_gold_replies_is_for_a_grader() -> None:
    first, *_ = tasks(prompt="question", answer="answer", gold="answer", grader="grade.py:length")
    assert first.gold == "sun"
    with pytest.raises(rlkit.UsageError, match="gold: it has no effect without grader"):
        tasks(prompt="question", answer="answer", gold="answer")


def test_a_template_fills_in_columns_and_chat_is_optional() -> None:
    (task,) = tasks(prompt="{question}, {{it}} begins with {hint}:", answer="answer", chat=False, start=1, stop=2)
    assert task.prompt() == "Spell tree, {it} begins with t:"
    assert task.task_id == "data-1"


def test_a_system_prompt_precedes_the_question() -> None:
    assert [
        message["role"] for message in tasks(prompt="question", answer="answer", system="Be short.")[0].prompt()
    ] == [
        "system",
        "user",
    ]


def test_a_grader_gets_the_answer_or_the_row() -> None:
    outcome = tasks(prompt="question", answer="answer", grader="grade.py:length")[2].grade(reply("x"))
    assert isinstance(outcome, Outcome)
    assert outcome.metrics == {"length": 5.0}
    assert tasks(prompt="question", grader="grade.py:hint")[0].grade(reply("sea")) == 1.0


def test_messages_are_passed_as_they_are() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    Path("chats.json").write_text(json.dumps([{"prompt": messages, "answer": "c"}]))
    assert tasks(path="chats.json", answer="answer")[0].prompt() == messages


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "answer: set it to the column of the answer, or set grader"),
        (
            {"answer": "answer"},
            "prompt: row 0 (counted from 0) of data.jsonl has no column 'prompt'.",
        ),
        (
            {"prompt": "{questoin}", "answer": "answer"},
            "as {{ or }}). Did you mean 'question'?",
        ),
        (
            {"prompt": "question", "answer": "anwser"},
            "answer: row 0 (counted from 0) of data.jsonl has no column 'anwser'. Did you mean 'answer'?",
        ),
        ({"prompt": "question", "answer": "answer", "start": 3}, "path: data.jsonl has no row from 3 on"),
        ({"prompt": "question", "answer": "answer", "path": "date.jsonl"}, "Did you mean 'data.jsonl'?"),
        ({"prompt": "question", "answer": "answer", "system": "a", "chat": False}, "system: it has no effect"),
        (
            {"prompt": "question", "answer": "answer", "grader": "grade.py:short"},
            "grader: it must take the reply's text and the answer: too many positional arguments",
        ),
        ({"path": "odd.jsonl", "answer": "answer"}, "is neither a text nor a list of messages"),
        ({"path": "role.jsonl", "answer": "answer"}, "is neither a text nor a list of messages"),
        (
            {"path": "null.jsonl", "answer": "answer"},
            "answer: row 0 (counted from 0) of null.jsonl has an empty 'answer': fill it in",
        ),
        (
            {"prompt": "{a}", "path": "odd.jsonl", "answer": "prompt"},
            "'a' of row 0 (counted from 0) of odd.jsonl is neither a text",
        ),
        ({"prompt": "question", "answer": "answer", "stop": 10**30}, "expected at most"),
        (
            {"path": "table.csv", "prompt": "q", "answer": "answer"},
            "prompt: row 0 (counted from 0) of table.csv has no column 'q'",
        ),
        ({"path": "empty.CSV", "answer": "answer"}, "path: empty.CSV has no row from 0 on, besides its header"),
    ],
)
def test_a_mistake_is_one_line(args: dict[str, Any], line: str) -> None:
    Path("odd.jsonl").write_text('{"prompt": [1], "answer": 2, "a": {"b": 1}}\n')
    Path("role.jsonl").write_text('{"prompt": [{"role": "alien", "content": "a"}], "answer": 2}\n')
    Path("null.jsonl").write_text('{"prompt": "a", "answer": null}\n')
    Path("table.csv").write_text("question,answer\na,b\n")
    Path("empty.CSV").write_text("prompt,answer\n")
    with pytest.raises(rlkit.RlkitError, match=re.escape(line)) as caught:
        tasks(**args)
    assert "\n" not in str(caught.value)


def test_the_files_of_the_page_train(byte_model_dir: Path) -> None:
    for language, name in (("text", "questions.jsonl"), ("yaml", "capitals.yaml"), ("python", "capitals.py")):
        found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        assert found is not None
        Path(name).write_text(found[1])
    result = rlkit.train("capitals.yaml", model=str(byte_model_dir), steps=1, lora={"rank": 2}, trackers=[])
    assert result.metrics["env/capitals/episodes"] == 16


def test_a_section_is_an_environment_in_python_and_a_row_that_is_evaluated_is_not_trained_on(
    byte_model_dir: Path,
) -> None:
    args = {"path": "data.jsonl", "prompt": "question", "answer": "answer"}
    notes = list[str]()

    class Ears(rlkit.Tracker):
        def on_note(self, message: str) -> None:
            notes.append(message)

    result = rlkit.train(
        model=str(byte_model_dir),
        envs={"table": {"env": "rows", "args": args}},
        eval={"envs": {"held_out": {"env": "rows", "args": {**args, "start": 2}}}},
        steps=1,
        batch={"groups": 2, "group_size": 2},
        sampling={"max_tokens": 2},
        trackers=[Ears()],
    )
    played = pandas.read_parquet(result.directory / "episodes")
    assert set(played.task) == {"data-0", "data-1"}
    assert any("1 task" in note and "evaluated" in note for note in notes), notes
