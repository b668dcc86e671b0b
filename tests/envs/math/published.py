"""Each dataset of the catalogue as it lies on the hub: files, cards, configurations, columns and types as published.

The problems are our own, since few of the published ones may be copied; what they look like is the published form: the
kinds of answers, nulls, several rows of one problem, a speaker before a question. Which forms are confirmed, and by
what, is said beside each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow
import yaml

from rlkit.envs.math.catalogue import DATASETS
from tests.envs.math.fake_hub import Files, json_lines, parquet_file

EARLIER, NEWEST = "a" * 40, "b" * 40
"""Commits of the repositories of which the catalogue knows none."""


@dataclass(frozen=True)
class Item:
    """A problem: its right answer as published, the same in another notation, and a wrong one."""

    question: str
    answer: str
    same: str
    wrong: str


EXPRESSIONS = (
    Item("What is $\\frac{1}{4}$ of $\\frac{2}{3}$?", "\\frac{1}{6}", "1/6", "\\frac{1}{5}"),
    Item("Write $\\sqrt{50}$ in simplest form.", "5\\sqrt{2}", "\\sqrt{50}", "2\\sqrt{5}"),
    Item("Which $x$ satisfy $x^2<9$?", "(-3,3)", "\\left(-3, 3\\right)", "[-3,3]"),
    Item("Convert $(0,3)$ to polar coordinates.", "\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\pi/2)", "(3,\\pi)"),
    Item("Factor $x^2-5x+6$.", "(x-2)(x-3)", "(x-3)(x-2)", "(x+2)(x-3)"),
    Item("How many degrees has a right angle?", "90^\\circ", "90", "91"),
    Item("Solve $x^2=16$.", "4,-4", "-4, 4", "4"),
    Item("What is $\\int_0^1 \\frac{dx}{1+x^2}$?", "\\dfrac{\\pi}{4}", "\\frac{\\pi}{4}", "\\frac{\\pi}{3}"),
    Item("In which grade is a pupil after the fifth?", "\\text{sixth}", "sixth", "fifth"),
    Item("What is $\\begin{pmatrix}1\\\\2\\end{pmatrix}$ doubled?",
         "\\begin{pmatrix} 2 \\\\ 4 \\end{pmatrix}", "\\begin{pmatrix}2\\\\4\\end{pmatrix}",
         "\\begin{pmatrix}2\\\\2\\end{pmatrix}"),
)  # fmt: skip

NUMBERS = tuple(
    Item(f"Find the remainder when ${n}^2$ is divided by $1000$.", str(n * n % 1000), f"\\text{{{n * n % 1000}}}",
         str(n * n % 1000 + 1))
    for n in (34, 45, 56, 67, 78, 89, 91, 102, 113, 124)
)  # fmt: skip

SCIENCE = (
    Item("What mass in kg has the star?", "4.5e33", "4.5 \\times 10^{33}", "4.5 \\times 10^{32}"),
    Item("What is the pH of the solution?", "6.3", "6.30", "6.4"),
    Item("Give the potential $V(x)$ of a spring.", "\\frac{1}{2} k x^{2}", "\\frac{k x^2}{2}", "k x^2"),
    Item("At which angle does light leave the prism?", "\\arcsin{1.3}", "\\arcsin(1.3)", "\\arcsin(1.2)"),
    Item("How many electrons are there?", "8.7e8", "870000000", "87000000"),
    Item("What is the wavelength in cm?", "-0.75", "-\\frac{3}{4}", "0.75"),
    Item("Which speed in m/s?", "1.07e16", "1.07 \\cdot 10^{16}", "1.07 \\cdot 10^{15}"),
    Item("Solve $y'=y$ with $y(0)=1$.", "e^{x}", "\\exp(x)", "e^{-x}"),
)


def varied(items: Sequence[Item]) -> list[Item]:
    """Other problems with the same answers."""
    return [replace(item, question=f"Once more: {item.question}") for item in items]


STRING, INT, FLOAT = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
STRINGS = pyarrow.list_(STRING)
MESSAGE = {"content": STRING, "role": STRING}


def _struct(**fields: pyarrow.DataType) -> pyarrow.DataType:
    return pyarrow.struct(list(fields.items()))


def _table(rows: Sequence[Mapping[str, object]], **types: pyarrow.DataType) -> bytes:
    return parquet_file(rows, pyarrow.schema(list(types.items())), row_group_size=4)


def _card(**about: object) -> bytes:
    return f"---\n{yaml.safe_dump(about)}---\n\n# A dataset\n".encode()


def _features(**types: str) -> list[dict[str, str]]:
    return [{"name": name, "dtype": dtype} for name, dtype in types.items()]


def _config(name: str, **paths: str) -> dict[str, object]:
    return {"config_name": name, "data_files": [{"split": split, "path": path} for split, path in paths.items()]}


def _gsm8k() -> Files:
    """Confirmed by the files of openai/grade-school-math and the card: two configurations, of question and answer."""
    features = _features(question="string", answer="string")
    files = {
        "README.md": _card(
            license=["mit"],
            dataset_info=[{"config_name": name, "features": features} for name in ("main", "socratic")],
            configs=[
                _config(name, train=f"{name}/train-*", test=f"{name}/test-*") for name in ("main", "socratic")
            ],
        )
    }  # fmt: skip
    for config, worked in (("main", "{0} <<{0}={0}>>"), ("socratic", "How many? ** {0} <<{0}={0}>>")):
        for split, items in (("train", NUMBERS[:8]), ("test", NUMBERS[8:])):
            rows = [
                {"question": item.question, "answer": f"{worked.format(item.answer)}.\n#### {item.answer}"}
                for item in items
            ]
            if split == "train":
                rows.append({"question": "How many metres are there in 5 km?", "answer": "1,000 each.\n#### 5,000"})
            files[f"{config}/{split}-00000-of-00001.parquet"] = _table(rows, question=STRING, answer=STRING)
    return files


def _math500() -> Files:
    """Confirmed by the file itself and the listing of the repository: one file of JSON lines, a card without types."""
    rows = [
        {
            "problem": item.question, "solution": f"It is $\\boxed{{{item.answer}}}$.", "answer": item.answer,
            "subject": "Intermediate Algebra", "level": place % 5 + 1,
            "unique_id": f"test/intermediate_algebra/{place}.json",
        }
        for place, item in enumerate(EXPRESSIONS)
    ]  # fmt: skip
    return {"README.md": _card(language=["en"], task_categories=["text-generation"]), "test.jsonl": json_lines(rows)}


SUBJECTS = {
    "algebra": "Algebra", "counting_and_probability": "Counting & Probability", "geometry": "Geometry",
    "intermediate_algebra": "Intermediate Algebra", "number_theory": "Number Theory", "prealgebra": "Prealgebra",
    "precalculus": "Precalculus",
}  # fmt: skip


def _hendrycks() -> Files:
    """Confirmed by the card and the listing: seven configurations with two splits, all of them texts."""
    types = dict.fromkeys(("problem", "level", "type", "solution"), STRING)
    features = _features(**dict.fromkeys(types, "string"))
    files = {
        "README.md": _card(
            license="mit",
            dataset_info=[{"config_name": name, "features": features} for name in SUBJECTS],
            configs=[_config(name, train=f"{name}/train-*", test=f"{name}/test-*") for name in SUBJECTS],
        )
    }
    for number, (config, subject) in enumerate(SUBJECTS.items()):
        for split in ("train", "test"):
            rows = [
                {
                    "problem": f"For the {split} of {subject}: {item.question}", "level": f"Level {place + 1}",
                    "type": subject, "solution": f"Not $\\boxed{{0}}$ but $\\boxed{{{item.answer}}}$.",
                }
                for place, item in enumerate(EXPRESSIONS[number : number + 2])
            ]  # fmt: skip
            if (config, split) == ("geometry", "test"):
                rows[0] |= {"level": "Level ?", "problem": EXPRESSIONS[5].question}  # it is in MATH-500 too
            files[f"{config}/{split}-00000-of-00001.parquet"] = _table(rows, **types)
    return files


def _minerva() -> Files:
    """Confirmed by the listing and by three users of its two columns: one file of JSON lines."""
    rows = [{"question": item.question, "answer": item.answer} for item in SCIENCE]
    return {"README.md": _card(language=["en"], size_categories=["n<1K"]), "test.jsonl": json_lines(rows)}


def _polaris() -> Files:
    """Columns confirmed by the card; that it is one Parquet file, and its name, are not."""
    items = [EXPRESSIONS[1], NUMBERS[1], *varied([*EXPRESSIONS, *NUMBERS])]  # two are in MATH-500 and AIME too
    rows = [
        {"difficulty": f"{(place + 1) % 8}/8", "problem": item.question, "answer": item.answer}
        for place, item in enumerate(items)
    ]
    large = pyarrow.large_string()
    table = _table(rows, difficulty=large, problem=large, answer=large)
    return {"README.md": _card(license="apache-2.0"), "polaris-data-53K.parquet": table}


def _deepmath() -> Files:
    """Confirmed by the card: several files, seven columns, of which three are long."""
    texts = ("question", "final_answer", "topic", "r1_solution_1", "r1_solution_2", "r1_solution_3")
    types: dict[str, Any] = dict.fromkeys(texts, STRING) | {"difficulty": FLOAT}
    files = {
        "README.md": _card(
            license="mit",
            dataset_info={"features": _features(**{n: "float64" if n == "difficulty" else "string" for n in types})},
            configs=[_config("default", train="data/train-*")],
        )
    }
    answers = [*EXPRESSIONS, Item("Is $\\mathbb{Q}$ dense?", "Yes", "\\text{Yes}", "No"),
               Item("What is $\\lim_{x\\to 0^+} 1/x$?", "\\infty", "+\\infty", "-\\infty")]  # fmt: skip
    for part in range(2):
        rows = [
            {
                "question": item.question, "final_answer": item.answer,
                "difficulty": -1.0 if place == 0 else 4.5 + place,
                "topic": "Mathematics -> Calculus -> Limits",
                **{f"r1_solution_{n}": f"{n} wait " * 400 for n in (1, 2, 3)},
            }
            for place, item in enumerate(answers[part::2])
        ]  # fmt: skip
        files[f"data/train-{part:05d}-of-00002.parquet"] = _table(rows, **types)
    return files


def _dapo() -> Files:
    """Confirmed by the script in the repository that made it: three configurations, with nested columns."""
    types: dict[str, Any] = {
        "prompt": STRING, "solution": STRING, "data_source": STRING,
        "source_prompt": pyarrow.list_(_struct(**MESSAGE)), "ability": STRING,
        "reward_model": _struct(ground_truth=STRING, style=STRING), "extra_info": _struct(index=STRING),
    }  # fmt: skip
    chinese = Item("求$10^2$除以$7$的余数。", "2", "\\text{2}", "3")
    files = {
        "README.md": _card(configs=[_config(name, train=f"{name}/train-*") for name in ("all", "cn", "en")])
    }  # fmt: skip
    for config, items in (("all", [*NUMBERS, chinese]), ("cn", [chinese]), ("en", NUMBERS)):
        rows = [
            {
                "prompt": item.question, "solution": item.answer, "data_source": "math_dapo", "ability": "MATH",
                "source_prompt": [{"role": "user", "content": f"Solve step by step.\n\n{item.question}"}],
                "reward_model": {"ground_truth": item.answer, "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": f"9a9b6eb4-{place}"},
            }
            for place, item in enumerate(items)
        ]  # fmt: skip
        files[f"{config}/train-00000-of-00001.parquet"] = _table(rows, **types)
    return files


def _aime(year: str) -> Files:
    """Confirmed by the cards of 2024 and 2026; that of 2025 only in part, by those of other years of the same owner."""
    items = {"2024": NUMBERS[:4], "2025": NUMBERS[4:7], "2026": NUMBERS[7:]}[year]
    rows: list[dict[str, object]] = [
        {"problem": item.question, "answer": int(item.answer), "problem_idx": place + 1, "problem_type": ["Algebra"]}
        for place, item in enumerate(items)
    ]
    types: dict[str, Any] = {"problem_idx": INT, "answer": INT, "problem": STRING}
    if year == "2024":
        types = {"id": INT, "problem": STRING, "solution": STRING, "answer": STRING, "url": STRING, "year": STRING}
        for place, (row, item) in enumerate(zip(rows, items, strict=True)):
            row |= {"id": 60 + place, "answer": item.answer.zfill(3), "year": year, "solution": "…", "url": "https://…"}
    elif year == "2025":
        types = {"problem_idx": INT, "problem": STRING, "answer": INT, "problem_type": STRINGS}
    kinds = {name: "int64" if types[name] == INT else "string" for name in types if name != "problem_type"}
    features: list[dict[str, str]] = _features(**kinds)
    if "problem_type" in types:
        features.append({"name": "problem_type", "sequence": "string"})
    card = _card(dataset_info={"features": features}, configs=[_config("default", train="data/train-*")])
    return {"README.md": card, "data/train-00000-of-00001.parquet": _table(rows, **types)}


def _dolci_zero(*, lists: bool) -> Files:
    """Columns confirmed by users; they disagree on whether an answer is a text or a list, and a speaker is there."""
    rows = [
        {
            "prompt": item.question if place % 2 else f"user: {item.question}", "dataset": ["math"],
            "ground_truth": [item.answer] if lists else item.answer,
            "messages": [{"role": "user", "content": item.question}],
        }
        for place, item in enumerate(EXPRESSIONS)
    ]  # fmt: skip
    types: dict[str, Any] = {"prompt": STRING, "ground_truth": STRINGS if lists else STRING, "dataset": STRINGS}
    table = _table(rows, **types, messages=pyarrow.list_(_struct(**MESSAGE)))
    return {"README.md": _card(license="odc-by"), "data/train-00000-of-00001.parquet": table}


def _dolci_think() -> Files:
    """Confirmed by users of it and the card of a sibling: lists of answers and of datasets, columns of nulls."""
    kinds = ("math", "code", "ifeval", "math", "general-quality_ref")
    rows = [
        {
            "prompt": f"user: {item.question}", "ground_truth": [item.answer], "dataset": [kinds[place % 5]],
            "original_dataset": "hamishivi/rlvr_orz_math_57k_collected", "dataset_source": "math",
            "outputs": None if place % 3 else ["a", None], "custom_id": f"math-{place}", "id": None, "key": None,
            "constraint_type": None, "total_rollouts": 8 if place % 2 else None, "passrate": None,
            "input_ids_prompt": [1, 2, 3],
        }
        for place, item in enumerate([*EXPRESSIONS, *NUMBERS])
    ]  # fmt: skip
    rows[3]["ground_truth"] = None
    texts = ("prompt", "original_dataset", "dataset_source", "custom_id", "id", "key", "constraint_type")
    types: dict[str, Any] = dict.fromkeys(texts, STRING) | {
        "ground_truth": STRINGS, "dataset": STRINGS, "outputs": STRINGS, "total_rollouts": INT, "passrate": FLOAT,
        "input_ids_prompt": pyarrow.list_(INT),
    }  # fmt: skip
    half = len(rows) // 2
    parts = [_table(part, **types) for part in (rows[:half], rows[half:])]
    card = _card(license="odc-by", configs=[_config("default", train="data/train-*")])
    return {"README.md": card} | {f"data/train-{n:05d}-of-00002.parquet": part for n, part in enumerate(parts)}


NEMOTRON_SPLITS = ("high_part00", "high_part01", "high_part02", "medium", "low")


def _nemotron(*, lines: bool) -> Files:
    """Confirmed by the cards and listings, as JSON lines and as Parquet; not, which of them the known commit has."""
    turn = MESSAGE | {"reasoning_content": STRING, "tool_call_id": STRING, "name": STRING}
    rate = _struct(count=INT, accuracy=FLOAT, **{"pass": INT})
    tool = _struct(type=STRING, function=_struct(name=STRING))
    texts = ("uuid", "problem", "expected_answer", "original_expected_answer", "data_source", "license", "url")
    types: dict[str, Any] = dict.fromkeys(texts, STRING) | {
        "changed_answer_to_majority": pyarrow.bool_(), "messages": pyarrow.list_(_struct(**turn)),
        "metadata": _struct(reason_high_no_tool=rate), "used_in": STRINGS, "tools": pyarrow.list_(tool),
    }  # fmt: skip
    files = dict[str, bytes]()
    for split in NEMOTRON_SPLITS:
        rows = [
            {
                "uuid": f"{place}-{trace}", "problem": item.question, "expected_answer": item.answer,
                "original_expected_answer": None if place < 2 else item.answer, "changed_answer_to_majority": place < 2,
                "data_source": ("aops", "stackflow")[place % 2], "license": "cc-by-4.0", "url": None,
                "messages": [
                    {"role": role, "content": "…", "reasoning_content": "wait " * 50, "tool_call_id": "", "name": ""}
                    for role in ("user", "assistant")
                ],
                "metadata": {"reason_high_no_tool": {"count": 8, "pass": 4, "accuracy": 0.5}},
                "used_in": ["nano_v3"], "tools": [{"type": "function", "function": {"name": "python"}}] * trace,
            }
            for place, item in enumerate(NUMBERS if split == "low" else EXPRESSIONS)
            for trace in range(2)
        ]  # fmt: skip
        name = f"data/{split.replace('_part', '.part_') if lines else split}.{'jsonl' if lines else 'parquet'}"
        files[name] = json_lines(rows) if lines else _table(rows, **types)
    paths = dict(zip(NEMOTRON_SPLITS, files, strict=True))
    return {"README.md": _card(configs=[_config("default", **paths)]), **files}


def _catalogue_commit(dataset: str, repository: str) -> str:
    """The commit that the catalogue names for a repository."""
    tables = [table for tables in DATASETS[dataset].splits.values() for table in tables]
    return next(table.revision or NEWEST for table in tables if table.repository == repository)


def published() -> Mapping[str, Mapping[str, Files]]:
    """The repositories of the catalogue, at the commits that it names."""
    file_makers: dict[tuple[str, str], Callable[[], Files]] = {
        ("gsm8k", "openai/gsm8k"): _gsm8k,
        ("math500", "HuggingFaceH4/MATH-500"): _math500,
        ("hendrycks", "EleutherAI/hendrycks_math"): _hendrycks,
        ("minerva", "math-ai/minervamath"): _minerva,
        ("polaris", "POLARIS-Project/Polaris-Dataset-53K"): _polaris,
        ("deepmath", "zwhe99/DeepMath-103K"): _deepmath,
        ("dapo", "open-r1/DAPO-Math-17k-Processed"): _dapo,
        ("aime", "HuggingFaceH4/aime_2024"): lambda: _aime("2024"),
        ("aime", "MathArena/aime_2025"): lambda: _aime("2025"),
        ("aime", "MathArena/aime_2026"): lambda: _aime("2026"),
        ("olmo3_rlzero_7b", "allenai/Dolci-RL-Zero-Math-7B"): lambda: _dolci_zero(lists=False),
        ("olmo3_rl_32b", "allenai/Dolci-Think-RL-32B"): _dolci_think,
        ("nemotron", "nvidia/Nemotron-Math-v2"): lambda: _nemotron(lines=False),
    }
    newest_commit = {
        repository: {_catalogue_commit(name, repository): make()} for (name, repository), make in file_makers.items()
    }
    earlier = {
        "allenai/Dolci-RL-Zero-Math-7B": _dolci_zero(lists=True),
        "nvidia/Nemotron-Math-v2": _nemotron(lines=True),
    }
    return {
        name: ({EARLIER: earlier[name]} if name in earlier else {}) | commits for name, commits in newest_commit.items()
    }
