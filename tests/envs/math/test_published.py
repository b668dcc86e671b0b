"""Each dataset of the catalogue is read in its published form, graded, trained on for a step and evaluated."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow
import pytest

from rlkit.chat.format import ChatFormat, ParsedReply
from rlkit.chat.renderers import chat_format
from rlkit.config.loading.load import load_config
from rlkit.envs.math import MathProblem, maths
from rlkit.envs.math.catalogue import DATASETS
from rlkit.testing import ByteChat, ScriptedPolicy, SimulatedTinker, World, run_virtual
from rlkit.tokenizers.load import load_tokenizer
from rlkit.training.trainer import RLTrainer
from rlkit.types import Message, Prompt, Tokens, Tool
from tests.envs.math.fake_hub import Files, LoadRequest, LoadResult, fake_hub, load, one_table, parquet_file
from tests.envs.math.published import (
    EARLIER,
    EXPRESSIONS,
    NUMBERS,
    SCIENCE,
    SUBJECTS,
    Item,
    published,
    varied,
)
from tests.marks import split_slow

EXAMPLES = Path(__file__).parents[3] / "examples"
OLMO = "allenai/Dolci-RL-Zero-Math-7B"

type Form = tuple[str, str]
"""A dataset and its split."""

FORMS: Sequence[Form] = [(name, split) for name, about in DATASETS.items() for split in about.splits]
THINKING = [*EXPRESSIONS, *NUMBERS]
HELD_APART = ("geometry", "test", 0)

ITEMS: Mapping[Form, Sequence[Item]] = {
    ("gsm8k", "train"): [*NUMBERS[:8], Item("How many metres are there in 5 km?", "5,000", "5000", "500")],
    ("gsm8k", "test"): NUMBERS[8:],
    ("math500", "test"): EXPRESSIONS,
    ("hendrycks", "train"): [
        item
        for split in ("train", "test")
        for number, subject in enumerate(SUBJECTS)
        for place, item in enumerate(EXPRESSIONS[number : number + 2])
        if (subject, split, place) != HELD_APART
    ],
    ("minerva", "test"): SCIENCE,
    ("polaris", "train"): [EXPRESSIONS[1], NUMBERS[1], *varied(THINKING)],
    ("deepmath", "train"): [
        *EXPRESSIONS[::2],
        Item("Is $\\mathbb{Q}$ dense?", "Yes", "\\text{Yes}", "No"),
        *EXPRESSIONS[1::2],
        Item("What is $\\lim_{x\\to 0^+} 1/x$?", "\\infty", "+\\infty", "-\\infty"),
    ],
    ("dapo", "train"): [*NUMBERS, Item("求$10^2$除以$7$的余数。", "2", "\\text{2}", "3")],
    ("aime", "test"): NUMBERS,
    ("aime", "2024"): NUMBERS[:4],
    ("aime", "2025"): NUMBERS[4:7],
    ("aime", "2026"): NUMBERS[7:],
    ("olmo3_rlzero_7b", "train"): EXPRESSIONS,
    ("olmo3_rl_32b", "train"): [THINKING[place] for place in (0, 5, 8, 10, 13, 15, 18)],
    ("nemotron", "train"): EXPRESSIONS,
    ("nemotron", "medium"): EXPRESSIONS,
    ("nemotron", "low"): NUMBERS,
}
"""The problems of each form that are for tasks, in the order of the rows."""

LEFT_OUT = {
    "hendrycks": "27 of 28 problems (1 are in an excluded set)",
    "olmo3_rl_32b": "7 of 8 problems (1 have no question or no answer)",
    "nemotron": "10 of 20 problems (10 are duplicates)",
}

LABELS = {
    "gsm8k": (None, None),
    "math500": ("1", "Intermediate Algebra"),
    "hendrycks": ("Level 1", "Algebra"),
    "minerva": (None, None),
    "polaris": ("1/8", None),
    "deepmath": ("-1", "Mathematics -> Calculus -> Limits"),
    "dapo": (None, None),
    "aime": (None, "2024"),
    "olmo3_rlzero_7b": (None, None),
    "olmo3_rl_32b": (None, None),
    "nemotron": (None, "aops"),
}
"""The level and the subject of the first problem."""

EVALUATED = {"gsm8k": "test", "aime": "2026", "nemotron": "low"}
"""The split to evaluate on; of the others, a share."""


RENAMED, OBJECTS, NUMERIC, OTHER_SPLIT, WIDE = (digit * 40 for digit in "12345")
"""Commits at which Dolci's repository has other forms."""


def other_forms() -> Mapping[str, Files]:
    def answers(value: object, kind: pyarrow.DataType) -> Files:
        schema = pyarrow.schema([("prompt", pyarrow.string()), ("ground_truth", kind)])
        return {"train-00000.parquet": parquet_file([{"prompt": "user: ?", "ground_truth": value}], schema)}

    unit = pyarrow.struct([("value", pyarrow.string()), ("unit", pyarrow.string())])
    noise = random.Random(1)  # nothing makes it smaller, and the library reads 5 MB at once
    wide = [
        {"prompt": item.question, "ground_truth": item.answer, "outputs": noise.randbytes(2_000_000).hex()}
        for item in NUMBERS
    ]
    return {
        RENAMED: one_table([{"question": "What is it?", "answer": "1"}]),
        OBJECTS: answers({"value": "1", "unit": "m"}, unit),
        NUMERIC: answers([1.5], pyarrow.list_(pyarrow.float64())),
        OTHER_SPLIT: {"test-00000.parquet": one_table([{"prompt": "?", "ground_truth": "1"}])["train-00000.parquet"]},
        WIDE: one_table(wide),
    }


@dataclass(frozen=True)
class Read:
    """rlkit's cache after everything was read from the hub, what became of it, and how many bytes of each commit."""

    cache: Path
    forms: Mapping[Form, LoadResult]
    others: Mapping[str, LoadResult]
    bytes_read: Mapping[str, int]
    size_of_wide: int


OTHERS: Mapping[str, Mapping[str, object]] = {
    **{
        commit: {"dataset": "olmo3_rlzero_7b", "revision": commit}
        for commit in (RENAMED, OBJECTS, NUMERIC, OTHER_SPLIT, WIDE, EARLIER)
    },
    "lines": {"dataset": "nemotron", "revision": EARLIER},
    "apart": {"dataset": "olmo3_rlzero_7b", "exclude": ["math500"]},
}


@pytest.fixture(scope="module")
def hub_read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    folder = tmp_path_factory.mktemp("datasets")
    others = other_forms()
    repositories = published()
    with fake_hub({**repositories, OLMO: {**others, **repositories[OLMO]}}) as hub:
        forms = [LoadRequest(folder, {"dataset": name, "split": split}) for name, split in FORMS]
        loaded = load(hub, *forms, *(LoadRequest(folder, arguments) for arguments in OTHERS.values()))
    size = len(others[WIDE]["train-00000.parquet"])
    by_form = dict(zip(FORMS, loaded, strict=False))
    return Read(folder, by_form, dict(zip(OTHERS, loaded[len(FORMS) :], strict=True)), hub.read, size)


@pytest.fixture
def offline(hub_read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    """The datasets are there, and the hub is not."""
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(hub_read.cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def grade(task: MathProblem, answer: str) -> float:
    return asyncio.run(task.rollout(ScriptedPolicy([f"It is $\\boxed{{{answer}}}$."]))).reward


@pytest.mark.parametrize(
    "form", split_slow(((form,) for form in FORMS), lambda case: case[0] in FORMS[:5]), ids=":".join
)
@pytest.mark.usefixtures("offline")
def test_a_published_form_is_parsed_and_its_answers_are_graded(form: Form, hub_read: Read) -> None:
    name, split = form
    loaded, items, notes = hub_read.forms[form], ITEMS[form], list[str]()
    assert loaded.error is None
    tasks = maths(dataset=name, split=split, order="dataset", note=notes.append)
    assert [task.problem.answer for task in tasks] == loaded.answers
    counted = LEFT_OUT.get(name, f"{len(items)} of {len(items)} problems")
    assert notes == [f"{name}:{split}: {counted}"]
    assert len(tasks) == len(items)
    for task, item in zip(tasks, items, strict=True):
        assert task.problem.question.endswith(item.question)
        assert not task.problem.question.startswith("user:")
        assert [grade(task, answer) for answer in (item.answer, item.same, item.wrong)] == [1, 1, 0], item


@pytest.mark.parametrize("name", LABELS)
@pytest.mark.usefixtures("offline")
def test_a_problem_has_the_level_and_subject_of_its_row(name: str) -> None:
    problem = maths(dataset=name, order="dataset")[0].problem
    assert (problem.level, problem.subject) == LABELS[name]


class Guessing(ChatFormat):
    """A chat format whose model puts one of the answers of its dataset into a box, whatever it sampled."""

    def __init__(self, format_: ChatFormat, answers: Sequence[str]) -> None:
        self.stop, self.keeps_thinking = format_.stop, format_.keeps_thinking
        self._format, self._answers = format_, answers

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        return self._format.render(messages, tools)

    def parse(self, completion: Tokens) -> ParsedReply:
        answer = self._answers[int(completion.sum()) % len(self._answers)]
        return ParsedReply({"role": "assistant", "content": f"\\boxed{{{answer}}}"})

    def encode(self, text: str) -> Tokens:
        return self._format.encode(text)

    def decode(self, tokens: Tokens) -> str:
        return self._format.decode(tokens)


def play(config: object, chat: ChatFormat, folder: Path) -> tuple[World, dict[str, float]]:
    """Train for a step: the service's world, and the metrics of the step."""
    service = SimulatedTinker()
    trainer = RLTrainer(config, directory=folder, service=service, chat=chat)  # type: ignore[arg-type]  resolved
    assert run_virtual(trainer.train()).steps == 1
    return service.world, json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.usefixtures("offline")
def test_a_dataset_is_trained_on_for_a_step_and_evaluated(name: str, tmp_path: Path) -> None:
    train: dict[str, object] = {"dataset": name, "format_weight": 0.1}
    if name in EVALUATED:
        held_out = train | {"split": EVALUATED[name]}
        train |= {"split": "2024"} if name == "aime" else {}
    else:
        held_out = train | {"split": "test", "test_share": 0.4}
        train |= {"split": "train", "test_share": 0.4}
    settings = {
        "model": "simulated",
        "envs": {name: {"env": "math", "args": train}},
        "steps": 1,
        "batch": {"groups": 2, "group_size": 16},
        "sampling": {"max_tokens": 500},
        "eval": {"envs": {"held_out": {"env": "math", "args": held_out, "tasks": 2}}},
    }
    answers = sorted({item.answer for form, items in ITEMS.items() if form[0] == name for item in items})
    world, metrics = play(load_config([], settings=settings), Guessing(ByteChat(), answers), tmp_path / "run")
    assert (metrics[f"env/{name}/episodes"], metrics[f"env/{name}/failed"]) == (32, 0)
    assert 0 < metrics[f"env/{name}/correct"] < 1
    assert metrics[f"env/{name}/format"] == 1
    assert [len(sequences) > 0 for sequences in world.step_digests] == [True]
    expected = min(2, len(maths(**held_out)))  # type: ignore[arg-type]  as YAML gives them
    assert (metrics["eval/held_out/episodes"], metrics["eval/held_out/failed"]) == (expected, 0)


@cache
def real_format(model: str, renderer: str | None) -> ChatFormat:
    tokenizer = load_tokenizer(model, with_weights=False, note=lambda message: None)
    return chat_format(model, tokenizer, renderer=renderer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        *("maths/gsm8k.yaml", "maths/hendrycks.yaml", "maths/math500.yaml", "maths/polaris.yaml"),
        *("migrated/tinking_math500.yaml", "migrated/tinking_hendrycks.yaml", "migrated/tinking_polaris.yaml"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_an_example_of_a_published_dataset_plays_a_step(path: str, tmp_path: Path) -> None:
    small = ["steps=1", "batch.groups=2", "batch.group_size=4", "sampling.max_tokens=8", "track=null"]
    example = load_config([EXAMPLES / path]).config
    small += [f"eval.envs.{name}.tasks=2" for name in example.eval.envs]
    if (
        "llama" in example.model.lower()
    ):  # its tokenizer is in no package that the tests have; the example names this one
        small.append("model=Qwen/Qwen3.5-9B")
    resolved = load_config([EXAMPLES / path], small)
    answers = [item.answer for item in (*EXPRESSIONS[:2], *NUMBERS[:2])]
    chat = Guessing(real_format(resolved.config.model, resolved.config.chat.renderer), answers)
    _, metrics = play(resolved, chat, tmp_path / "run")
    (name,) = example.envs
    assert (metrics[f"env/{name}/episodes"], metrics[f"env/{name}/failed"]) == (8, 0)
    for held_out, spec in resolved.config.eval.envs.items():
        tasks = maths(**spec.args)  # type: ignore[arg-type]  as YAML gives them
        expected = min(2, len(tasks)) * (spec.attempts or 1)
        assert (metrics[f"eval/{held_out}/episodes"], metrics[f"eval/{held_out}/failed"]) == (expected, 0)


def test_answers_in_lists_of_texts_and_of_numbers_are_parsed(hub_read: Read) -> None:
    assert hub_read.others[EARLIER].answers == [item.answer for item in EXPRESSIONS]
    assert hub_read.others[NUMERIC].answers == ["1.5"]


def test_the_earlier_json_lines_of_nemotron_are_the_same_problems(hub_read: Read) -> None:
    assert hub_read.others["lines"].answers == hub_read.forms["nemotron", "train"].answers


def test_a_speaker_prefix_does_not_hide_a_duplicate_question(hub_read: Read) -> None:
    assert hub_read.others["apart"].error == (
        "UsageError: no problem of olmo3_rlzero_7b:train is left: 0 of 10 problems (10 are in an excluded set)"
    )


def test_a_changed_dataset_form_is_a_one_line_error(hub_read: Read) -> None:
    assert hub_read.others[RENAMED].error == (
        f"UsageError: dataset: {OLMO} at {RENAMED} has no column 'prompt'; it has question, answer. Its columns have "
        "changed: set revision to an earlier commit, or set path, question and answer"
    )
    assert hub_read.others[OBJECTS].error == (
        f"UsageError: {OLMO}: the column 'ground_truth' holds objects with value, unit; it must hold text or numbers"
    )
    bad_split = hub_read.others[OTHER_SPLIT].error or ""
    assert bad_split.startswith(f"MissingError: {OLMO} cannot be downloaded from the hub: ValueError: Bad split: train")
    assert "\n" not in bad_split


def test_a_table_that_lacks_a_column_is_not_cached(hub_read: Read) -> None:
    file_names = [path.name for path in (hub_read.cache / "datasets").glob("*.jsonl")]
    assert [name for name in file_names if NUMERIC in name]
    assert not [name for name in file_names if RENAMED in name]


def test_only_the_used_columns_of_a_wide_table_are_fetched(hub_read: Read) -> None:
    assert hub_read.others[WIDE].answers == [item.answer for item in NUMBERS]
    assert hub_read.bytes_read[WIDE] < hub_read.size_of_wide / 2
