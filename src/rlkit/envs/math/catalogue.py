r"""Catalogue of datasets: repositories, columns and prompts.

Invariant: the catalogue is data only; no code depends on a dataset's name. A revision is a commit, so a name always
selects the same rows. For the three datasets without a revision, a run records the commit that it read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rlkit.envs.math.grader import Policies
from rlkit.envs.math.prompts import Template

type Gold = Literal["column", "boxed", "hash"]
r"""Position of the gold answer: the whole `column`, its last `\boxed{…}`, or the text after its last `####`."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a table by their meaning.

    Args:
        answer: column with the gold answer; if it holds a list, the first item is the answer.
        gold: position of the gold answer in `answer`.
        level: column with the difficulty: a number, `Level 3`, or a share such as `3/8`.
        only: column and text; a row is used only if its column contains the text.
        speaker: prefix that is not part of a question, such as a role.
    """

    question: str
    answer: str
    gold: Gold = "column"
    level: str | None = None
    subject: str | None = None
    only: tuple[str, str] | None = None
    speaker: str = ""

    @property
    def names(self) -> list[str]:
        """Names of the columns that are read."""
        names = [self.question, self.answer, self.level, self.subject, self.only[0] if self.only else None]
        return list(dict.fromkeys(name for name in names if name is not None))


@dataclass(frozen=True, slots=True)
class Table:
    """Table on the hub.

    Args:
        revision: commit; None for the newest, which a run records.
        config: configuration of the repository, if it has several.
        subject: subject of all problems, if no column holds it.
        rows_max: maximum number of rows, from the beginning; None for all.
    """

    repository: str
    revision: str | None
    split: str
    columns: Columns
    config: str | None = None
    subject: str | None = None
    rows_max: int | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """Dataset of the catalogue.

    Args:
        exclude: datasets and splits, `name` or `name:split`, whose problems are excluded.
    """

    splits: Mapping[str, tuple[Table, ...]]
    licence: str
    template: Template = field(default_factory=Template)
    exclude: tuple[str, ...] = ()
    policies: Policies = field(default_factory=Policies)


_EVALUATED = Policies(unevaluated="reject")
"""Policies of datasets that test arithmetic: `17 + 25` is not an answer."""

_NUMBER_TEMPLATE = Template(suffix="Think step by step, then write the final number, without units, in \\boxed{}.")

_MATH_SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip


def _gsm8k_splits() -> dict[str, tuple[Table, ...]]:
    columns = Columns("question", "answer", gold="hash")
    revision = "740312add88f781978c0658806c59bc2815b9866"
    return {split: (Table("openai/gsm8k", revision, split, columns, config="main"),) for split in ("train", "test")}


def _hendrycks_splits() -> dict[str, tuple[Table, ...]]:
    columns = Columns("problem", "solution", gold="boxed", level="level", subject="type")
    revision = "21a5633873b6a120296cce3e2df9d5550074f4a3"
    tables = (
        Table("EleutherAI/hendrycks_math", revision, split, columns, config=subject)
        for split in ("train", "test")
        for subject in _MATH_SUBJECTS
    )
    return {"train": tuple(tables)}


def _aime_splits() -> dict[str, tuple[Table, ...]]:
    columns = Columns("problem", "answer")
    years = {
        "2024": ("HuggingFaceH4/aime_2024", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"),
        "2025": ("MathArena/aime_2025", "c94da77eb22bbd6439e62a323bec18493a421302"),
        "2026": ("MathArena/aime_2026", "10b4e45b7a503075d4da8a0d57916a4f06ce6bd2"),
    }
    tables = {
        year: Table(repository, revision, "train", columns, subject=year)
        for year, (repository, revision) in years.items()
    }
    return {"test": tuple(tables.values())} | {year: (table,) for year, table in tables.items()}


def _nemotron_splits() -> dict[str, tuple[Table, ...]]:
    columns = Columns("problem", "expected_answer", subject="data_source")
    revision = "8e793210e175b6406c752a870f585f62de98c0d3"
    splits = {"train": "high_part02", "medium": "medium", "low": "low"}
    return {
        name: (Table("nvidia/Nemotron-Math-v2", revision, split, columns, rows_max=100_000),)
        for name, split in splits.items()
    }


def _single_table(
    split: str, repository: str, revision: str | None, columns: Columns, *, config: str | None = None
) -> dict[str, tuple[Table, ...]]:
    return {split: (Table(repository, revision, split, columns, config),)}


_DOLCI_COLUMNS = Columns("prompt", "ground_truth", speaker="user:")
"""Columns of the Dolci datasets; a prompt is a conversation in one string, with a role before each message."""

DATASETS: Mapping[str, Dataset] = {
    "gsm8k": Dataset(_gsm8k_splits(), "mit", _NUMBER_TEMPLATE, policies=_EVALUATED),
    "math500": Dataset(
        _single_table(
            "test",
            "HuggingFaceH4/MATH-500",
            "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            Columns("problem", "answer", level="level", subject="subject"),
        ),
        "not declared; the problems are those of MATH (mit)",
    ),
    "hendrycks": Dataset(_hendrycks_splits(), "mit", exclude=("math500",)),
    "minerva": Dataset(
        _single_table("test", "math-ai/minervamath", None, Columns("question", "answer")), "not declared"
    ),
    "polaris": Dataset(
        _single_table(
            "train",
            "POLARIS-Project/Polaris-Dataset-53K",
            "296f8e34132e63f4a1d70e0dcc8bddebb43f03e4",
            Columns("problem", "answer", level="difficulty"),
        ),
        "apache-2.0",
    ),
    "deepmath": Dataset(
        _single_table(
            "train",
            "zwhe99/DeepMath-103K",
            "5cf055d1fe3d7a2eb19719ac020211469736ae44",
            Columns("question", "final_answer", level="difficulty", subject="topic"),
        ),
        "mit",
    ),
    "dapo": Dataset(
        _single_table(
            "train",
            "open-r1/DAPO-Math-17k-Processed",
            "31dd309567e3da778038cc87d868b6097a3ccf68",
            Columns("prompt", "solution"),
            config="all",
        ),
        "not declared; made from BytedTsinghua-SIA/DAPO-Math-17k (apache-2.0)",
        policies=_EVALUATED,
    ),
    "aime": Dataset(
        _aime_splits(), "cc-by-nc-sa-4.0 (2025, 2026); the text is the MAA's", _NUMBER_TEMPLATE, policies=_EVALUATED
    ),
    "olmo3_rlzero_7b": Dataset(_single_table("train", "allenai/Dolci-RL-Zero-Math-7B", None, _DOLCI_COLUMNS), "odc-by"),
    "olmo3_rl_32b": Dataset(
        _single_table("train", "allenai/Dolci-Think-RL-32B", None, replace(_DOLCI_COLUMNS, only=("dataset", "math"))),
        "odc-by",
    ),
    "nemotron": Dataset(_nemotron_splits(), "cc-by-4.0 and cc-by-sa-4.0"),
}
"""Datasets by name."""
