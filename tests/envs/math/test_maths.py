"""Datasets become tasks: the right rows, put as they should be, and graded."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.check import check
from rlkit.config.loading.objects import load_envs
from rlkit.config.schema import EnvConfig
from rlkit.envs.math import Example, MathProblem, Problem, Scoring, Template, maths
from rlkit.envs.math.catalogue import DATASETS
from rlkit.envs.math.grader import GoldError, validate
from rlkit.envs.math.problems import normalise_question
from rlkit.errors import UsageError
from rlkit.testing import ScriptedPolicy
from rlkit.types import Outcome

DATA = Path(__file__).parents[2] / "data" / "math"
GSM8K, GSM8K_TEST, NEW50 = DATA / "gsm8k_train.jsonl", DATA / "gsm8k_test.jsonl", DATA / "new50.json"


def outcome(task: MathProblem, reply: str, *, max_tokens: int = 10_000) -> Outcome:
    return asyncio.run(task.rollout(ScriptedPolicy([reply], max_tokens=max_tokens)))


def written(folder: Path, *rows: dict[str, object]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def refused(**arguments: object) -> str:
    with pytest.raises(UsageError) as caught:
        maths(**arguments)  # type: ignore[arg-type]  what is wrong is the point
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_answers_of_gsm8k_are_what_follows_the_hashes() -> None:
    tasks = maths(dataset="gsm8k", path=GSM8K, order="dataset")
    assert len(tasks) == 40
    assert tasks[0].problem.answer == "72"
    assert tasks[0].task_id == "gsm8k/0"
    assert "<<" not in str(tasks[0].prompt())


@pytest.mark.parametrize(("dataset", "path"), [("gsm8k", GSM8K), ("gsm8k", GSM8K_TEST), ("math500", NEW50)])
def test_every_right_answer_of_the_packaged_rows_earns_the_full_reward(dataset: str, path: Path) -> None:
    notes = list[str]()
    for task in maths(dataset=dataset, path=path, note=notes.append):
        assert outcome(task, f"So it is {task.gold}.").reward == 1.0
    assert "cannot be graded" not in notes[0]


def test_a_problem_passes_the_environment_checks() -> None:
    report = asyncio.run(check(maths(path=NEW50, question="problem"), tasks=2))
    assert report.ok, [finding for finding in report.findings if finding.status == "failed"]


def test_a_task_can_be_pickled() -> None:
    task = maths(dataset="gsm8k", path=GSM8K)[0]
    assert pickle.loads(pickle.dumps(task)) == task


@pytest.mark.parametrize(
    ("reply", "reward", "correct", "formatted"),
    [
        ("It is \\boxed{72}.", 1.0, 1, 1),
        ("\\boxed{5}, no: \\boxed{72}", 1.0, 1, 1),
        ("\\boxed{72}, no: \\boxed{5}", 0.0, 0, 1),
        ("<think>\\boxed{72}</think>I do not know.", -0.25, 0, 0),
        ("\\boxed{72", -0.25, 0, 0),
        ("", -0.25, 0, 0),
        ("seventy-three", -0.25, 0, 0),
    ],
)
def test_a_reply_is_rewarded_for_its_last_box_and_its_format(
    reply: str, reward: float, correct: float, formatted: float
) -> None:
    task = MathProblem(Problem("How many clips?", "72", 0), scoring=Scoring(format_weight=0.25))
    graded = outcome(task, reply)
    assert graded.reward == reward
    assert graded.metrics == {"correct": correct, "format": formatted}


def test_a_truncated_reply_is_badly_formatted() -> None:
    task = MathProblem(Problem("How many?", "7", 0), scoring=Scoring(format_weight=0.25))
    graded = outcome(task, "\\boxed{7} and so on and on", max_tokens=12)
    assert (graded.reward, graded.truncated) == (0.75, True)


def test_an_outcome_records_the_answer_and_the_kind_of_problem() -> None:
    task = MathProblem(Problem("How many?", "\\frac{1}{2}", 0, level="Level 3", subject="Algebra"))
    right, wrong = outcome(task, "\\boxed{\\frac{1}{2}}"), outcome(task, "\\boxed{3 }")
    assert right.info["answer"] == right.info["gold"] == "\\frac{1}{2}"
    assert wrong.info["answer"] == "3"
    assert wrong.info["labels"] == {"level": "Level 3", "subject": "Algebra"}
    assert outcome(task, "no idea").info["answer"] is None


def test_an_ungradable_gold_answer_fails_the_episode() -> None:
    assert not validate("")
    with pytest.raises(GoldError):
        outcome(MathProblem(Problem("How many?", "", 0)), "\\boxed{5}")


def test_a_function_can_replace_the_grader() -> None:
    def near(text: str, right: str) -> float:
        return 1 / (1 + abs(int(text) - int(right)))

    tasks = maths(dataset="gsm8k", path=GSM8K, order="dataset", grader=near)
    assert outcome(tasks[0], "73").reward == 0.5
    assert "format_weight and policies have no effect" in refused(path=GSM8K, grader=near, format_weight=0.1)


def test_a_prompt_has_suffix_system_message_and_examples() -> None:
    template = Template("In a box.", "Be brief.", (Example("1 + 1?", "\\boxed{2}"),))
    assert [(message["role"], message["content"]) for message in template.messages("2 + 2?")] == [
        ("system", "Be brief."),
        ("user", "1 + 1?\n\nIn a box."),
        ("assistant", "\\boxed{2}"),
        ("user", "2 + 2?\n\nIn a box."),
    ]
    (task, *_) = maths(dataset="gsm8k", path=GSM8K, examples=2, suffix="", order="dataset")
    assert len(task.prompt()) == 5
    assert task.prompt()[-1]["content"] == task.problem.question
    assert "there are 3 worked examples" in refused(path=GSM8K, examples=4)


def test_worked_examples_are_right_and_in_no_packaged_dataset() -> None:
    from rlkit.envs.math.grader import compare, final_answer
    from rlkit.envs.math.prompts import EXAMPLES

    golds = ["33", "5", "\\frac{3}{8}"]
    assert [
        compare(final_answer(example.reply) or "", gold) for example, gold in zip(EXAMPLES, golds, strict=True)
    ] == ["yes"] * 3


def problems(count: int) -> list[dict[str, object]]:
    return [
        {"question": f"What is {n} + {n}?", "answer": 2 * n, "level": f"Level {n % 5 + 1}", "subject": "ab"[n % 2]}
        for n in range(count)
    ]


def test_filters_orders_and_limits_choose_the_tasks(tmp_path: Path) -> None:
    path = written(tmp_path, *problems(40))
    kinds = {"path": path, "level": "level", "subject": "subject"}

    def load_chosen(**settings: object) -> Sequence[MathProblem]:
        return maths(**kinds, **settings)  # type: ignore[arg-type]  as given

    assert {task.problem.level for task in load_chosen(min_level=2, max_level=3)} == {"Level 2", "Level 3"}
    assert {task.problem.subject for task in load_chosen(subjects=["b"])} == {"b"}
    assert all(len(task.problem.question) <= 15 for task in load_chosen(max_question_characters=15))
    assert all(len(task.problem.answer) == 1 for task in load_chosen(max_answer_characters=1))
    levels = [task.problem.difficulty for task in load_chosen(order="descending", limit=10)]
    assert levels == [5.0] * 8 + [4.0] * 2
    assert [task.problem.place for task in load_chosen(order="dataset", limit=3)] == [0, 1, 2]
    shuffled = [task.problem.place for task in load_chosen(seed=1)]
    assert sorted(shuffled) == list(range(40)) != shuffled
    assert shuffled == [task.problem.place for task in load_chosen(seed=1)]
    assert shuffled[:5] == [task.problem.place for task in load_chosen(seed=1, limit=5)]


def test_excluded_problems_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"question": "What is 1 + 1?", "answer": "2"},
        {"question": "what is $1+1$ ?", "answer": "2"},
        {"question": "What is 2 + 2?", "answer": None},
        {"question": "What is 3 + 3?", "answer": "\\frac{{{"},
        {"question": "What is 4 + 4?", "answer": "8"},
        {"question": "What is 5 + 5?", "answer": ["10"]},
    ]
    excluded_path = tmp_path / "apart.csv"
    excluded_path.write_text("problem,answer\nWhat is 4+4?,8\n")
    notes = list[str]()
    tasks = maths(path=written(tmp_path, *rows), exclude=[str(excluded_path)], note=notes.append)
    assert sorted(task.problem.place for task in tasks) == [0, 5]
    assert notes == [
        "rows: 2 of 6 problems (1 are duplicates; 1 have no question or no answer; "
        "1 are in an excluded set; 1 have an answer that cannot be graded)"
    ]


def test_the_test_share_is_never_trained_on_for_any_seed(tmp_path: Path) -> None:
    path = written(tmp_path, *problems(300))
    train, test = (
        {task.content for task in maths(path=path, split=split, test_share=0.2, seed=seed)}
        for split, seed in (("train", 1), ("test", 2))
    )
    assert not train & test
    assert len(train | test) == 300
    assert 30 < len(test) < 90


def test_train_and_test_of_gsm8k_share_no_question() -> None:
    train, test = (
        {normalise_question(task.problem.question) for task in maths(path=p, gold="hash")} for p in (GSM8K, GSM8K_TEST)
    )
    assert not train & test


@pytest.mark.parametrize(
    ("question", "other", "same"),
    [
        ("What is $\\dfrac{1}{2} + 1$?", "what is \\frac12+1", True),
        ("Find $\\left( x+1 \\right)^2.$", "Find (x + 1)^2", True),
        ("What is 1 + 2?", "What is 1 - 2?", False),
        ("What is 12?", "What is 1.2?", False),
    ],
)
def test_questions_are_compared_after_normalisation(question: str, other: str, same: bool) -> None:
    assert (normalise_question(question) == normalise_question(other)) == same


@given(st.text())
def test_normalisation_is_idempotent(text: str) -> None:
    assert normalise_question(normalise_question(text)) == normalise_question(text) or not text.isascii()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "dataset: set it to one of gsm8k, "),
        ({"dataset": "gsm9k"}, "there is no 'gsm9k'. Did you mean 'gsm8k'?"),
        ({"path": Path("nowhere.jsonl")}, "there is no file 'nowhere.jsonl'"),
        ({"path": Path("rows.xls")}, "has no known format"),
        ({"path": NEW50}, "has no column 'question'."),
        ({"path": GSM8K, "split": "train"}, "has no split 'train'; set test_share"),
        ({"path": GSM8K, "test_share": 0.1}, "set it to train or test"),
        ({"dataset": "math500", "split": "train"}, "split: math500 has test, and no 'train'"),
        ({"dataset": "gsm8k", "split": "test", "test_share": 0.1}, "gsm8k has splits of its own"),
        ({"dataset": "gsm8k", "question": "problem"}, "question: has no effect"),
        (
            {"path": GSM8K, "gold": "hash", "exclude": ["math50"]},
            "neither a dataset nor a file. Did you mean 'math500'?",
        ),
        ({"path": GSM8K, "gold": "hash", "subjects": ["Algebra"]}, "no problem of gsm8k_train is left: 0 of 40"),
    ],
)
def test_invalid_settings_are_one_line_errors(arguments: dict[str, object], message: str) -> None:
    assert message in refused(**arguments)


def test_a_file_can_replace_a_split_of_a_dataset() -> None:
    (task, *_) = maths(dataset="gsm8k", split="test", path=GSM8K_TEST, order="dataset")
    assert task.task_id == "gsm8k:test/0"


def test_examples_can_be_configured() -> None:
    def first(examples: object) -> MathProblem:
        args = {"path": str(GSM8K), "gold": "hash", "examples": examples}
        spec = EnvConfig.model_validate({"env": "math", "args": args})
        tasks = load_envs("maths", spec, field="envs.maths", seed=3)
        assert isinstance(tasks, list)
        assert isinstance(tasks[0], MathProblem)
        return tasks[0]

    task = first([{"question": "1 + 1?", "reply": "\\boxed{2}"}])
    assert task.template.examples == (Example("1 + 1?", "\\boxed{2}"),)
    assert len(first(2).template.examples) == 2


def test_a_configuration_loads_maths() -> None:
    spec = EnvConfig.model_validate(
        {"env": "math", "args": {"dataset": "gsm8k", "path": str(GSM8K), "limit": 3, "policies": {"percent": "strict"}}}
    )
    notes = list[str]()
    tasks = load_envs("maths", spec, field="envs.maths", seed=3, note=notes.append)
    assert isinstance(tasks, list)
    assert len(tasks) == 3
    assert notes == ["envs.maths: gsm8k: 3 of 40 problems (37 are over the limit)"]
    assert isinstance(tasks[0], MathProblem)
    assert tasks[0].scoring.policies.percent == "strict"


def test_the_catalogue_is_consistent() -> None:
    expected_names = "gsm8k math500 hendrycks minerva polaris deepmath dapo aime olmo3_rlzero_7b olmo3_rl_32b nemotron"
    assert list(DATASETS) == expected_names.split()
    for about in DATASETS.values():
        assert about.licence
        for name in about.exclude:
            assert name.partition(":")[0] in DATASETS
        for table in (table for tables in about.splits.values() for table in tables):
            assert table.revision is None or len(table.revision) == 40
            assert table.repository.count("/") == 1


def test_the_page_names_every_dataset_and_its_source() -> None:
    page = (Path(__file__).parents[3] / "docs" / "maths.md").read_text()
    for name, about in DATASETS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        for table in (table for tables in about.splits.values() for table in tables):
            assert f"`{table.repository}`" in row
            assert (f"`{table.revision[:8]}`" if table.revision else "of the run") in row
        assert all(split in row for split in about.splits)
