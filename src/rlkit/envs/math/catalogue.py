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
    """Columns of a table by their meaning."""

    question: str
    answer: str  # column with the gold answer; if it holds a list, the first item is the answer
    gold: Gold = "column"  # position of the gold answer in `answer`
    level: str | None = None  # column with the difficulty: a number, `Level 3`, or a share such as `3/8`
    subject: str | None = None
    only: tuple[str, str] | None = None  # column and text; a row is used only if its column contains the text
    speaker: str = ""  # prefix that is not part of a question, such as a role

    @property
    def names(self) -> list[str]:
        """Names of the columns that are read."""
        names = [self.question, self.answer, self.level, self.subject, self.only[0] if self.only else None]
        return list(dict.fromkeys(name for name in names if name is not None))


@dataclass(frozen=True, slots=True)
class Table:
    """Table on the hub."""

    repository: str
    revision: str | None  # commit; None for the newest, which a run records
    split: str
    columns: Columns
    config: str | None = None  # configuration of the repository, if it has several
    subject: str | None = None  # subject of all problems, if no column holds it
    rows_max: int | None = None  # maximum number of rows, from the beginning; None for all


@dataclass(frozen=True, slots=True)
class Dataset:
    """Dataset of the catalogue."""

    splits: Mapping[str, tuple[Table, ...]]
    licence: str
    template: Template = field(default_factory=Template)
    exclude: tuple[str, ...] = ()  # datasets and splits, `name` or `name:split`, whose problems are excluded
    policies: Policies = field(default_factory=Policies)


_EVALUATED = Policies(unevaluated="reject")  # policies of datasets that test arithmetic: `17 + 25` is not an answer
_NUMBER_TEMPLATE = Template(suffix="Think step by step, then write the final number, without units, in \\boxed{}.")

_COMMITS: Mapping[str, str] = {
    "openai/gsm8k": "740312add88f781978c0658806c59bc2815b9866",
    "HuggingFaceH4/MATH-500": "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
    "EleutherAI/hendrycks_math": "21a5633873b6a120296cce3e2df9d5550074f4a3",
    "POLARIS-Project/Polaris-Dataset-53K": "296f8e34132e63f4a1d70e0dcc8bddebb43f03e4",
    "zwhe99/DeepMath-103K": "5cf055d1fe3d7a2eb19719ac020211469736ae44",
    "open-r1/DAPO-Math-17k-Processed": "31dd309567e3da778038cc87d868b6097a3ccf68",
    "HuggingFaceH4/aime_2024": "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
    "MathArena/aime_2025": "c94da77eb22bbd6439e62a323bec18493a421302",
    "MathArena/aime_2026": "10b4e45b7a503075d4da8a0d57916a4f06ce6bd2",
    "nvidia/Nemotron-Math-v2": "8e793210e175b6406c752a870f585f62de98c0d3",
}


def _table(repository: str, split: str, columns: Columns, config: str | None = None) -> Table:
    return Table(repository, _COMMITS.get(repository), split, columns, config)


_GSM8K = Columns("question", "answer", gold="hash")
_MATH500 = Columns("problem", "answer", level="level", subject="subject")
_HENDRYCKS = Columns("problem", "solution", gold="boxed", level="level", subject="type")
_POLARIS = Columns("problem", "answer", level="difficulty")
_DEEPMATH = Columns("question", "final_answer", level="difficulty", subject="topic")
_NEMOTRON = Columns("problem", "expected_answer", subject="data_source")
_DOLCI = Columns("prompt", "ground_truth", speaker="user:")
"""Columns of the Dolci datasets; a prompt is a conversation in one string, with a role before each message."""

_SUBJECTS = "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus"
_AIME = {
    repository[-4:]: replace(_table(repository, "train", Columns("problem", "answer")), subject=repository[-4:])
    for repository in ("HuggingFaceH4/aime_2024", "MathArena/aime_2025", "MathArena/aime_2026")
}
"""Tables by year."""

DATASETS: Mapping[str, Dataset] = {
    "gsm8k": Dataset(
        {split: (_table("openai/gsm8k", split, _GSM8K, "main"),) for split in ("train", "test")},
        "mit",
        _NUMBER_TEMPLATE,
        policies=_EVALUATED,
    ),
    "math500": Dataset(
        {"test": (_table("HuggingFaceH4/MATH-500", "test", _MATH500),)},
        "not declared; the problems are those of MATH (mit)",
    ),
    "hendrycks": Dataset(
        {
            "train": tuple(
                _table("EleutherAI/hendrycks_math", split, _HENDRYCKS, subject)
                for split in ("train", "test")
                for subject in _SUBJECTS.split()
            )
        },
        "mit",
        exclude=("math500",),
    ),
    "minerva": Dataset(
        {"test": (_table("math-ai/minervamath", "test", Columns("question", "answer")),)}, "not declared"
    ),
    "polaris": Dataset({"train": (_table("POLARIS-Project/Polaris-Dataset-53K", "train", _POLARIS),)}, "apache-2.0"),
    "deepmath": Dataset({"train": (_table("zwhe99/DeepMath-103K", "train", _DEEPMATH),)}, "mit"),
    "dapo": Dataset(
        {"train": (_table("open-r1/DAPO-Math-17k-Processed", "train", Columns("prompt", "solution"), "all"),)},
        "not declared; made from BytedTsinghua-SIA/DAPO-Math-17k (apache-2.0)",
        policies=_EVALUATED,
    ),
    "aime": Dataset(
        {"test": tuple(_AIME.values())} | {year: (table,) for year, table in _AIME.items()},
        "cc-by-nc-sa-4.0 (2025, 2026); the text is the MAA's",
        _NUMBER_TEMPLATE,
        policies=_EVALUATED,
    ),
    "olmo3_rlzero_7b": Dataset({"train": (_table("allenai/Dolci-RL-Zero-Math-7B", "train", _DOLCI),)}, "odc-by"),
    "olmo3_rl_32b": Dataset(
        {"train": (_table("allenai/Dolci-Think-RL-32B", "train", replace(_DOLCI, only=("dataset", "math"))),)}, "odc-by"
    ),
    "nemotron": Dataset(
        {
            name: (replace(_table("nvidia/Nemotron-Math-v2", split, _NEMOTRON), rows_max=100_000),)
            for name, split in {"train": "high_part02", "medium": "medium", "low": "low"}.items()
        },
        "cc-by-4.0 and cc-by-sa-4.0",
    ),
}
"""Datasets by name."""
