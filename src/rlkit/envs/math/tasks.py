r"""Maths datasets as tasks: those of the catalogue by name, and any table in a file.

Invariant: no task asks what a set that is kept apart asks, and each task's right answer can be graded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field

from rlkit.envs.math.catalogue import DATASETS, Columns, Dataset, Gold, Table
from rlkit.envs.math.files import read_rows
from rlkit.envs.math.grader import Policies, validate
from rlkit.envs.math.problem import MathProblem, OwnGrader, Scoring
from rlkit.envs.math.problems import Problem, normalised, read_problems
from rlkit.envs.math.prompts import EXAMPLES, Example, Template
from rlkit.envs.math.selection import Count, Order, Wanted, select
from rlkit.envs.math.tables import newest, table_rows
from rlkit.errors import UsageError, did_you_mean
from rlkit.tasks.provenance import PinTasks
from rlkit.types import Json

type Note = Callable[[str], None]
type Length = Annotated[int, Field(ge=1)]
type Commits = Mapping[str, str]
"""By the repository, where it is not the one of the catalogue."""

_QUESTIONS = ("question", "problem", "prompt")
"""Columns in which the questions of a file that is kept apart may stand."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where problems come from: a name for people, their rows as problems, and what the catalogue says of them."""

    name: str
    problems: Iterator[Problem | None]
    dataset: Dataset


def maths(
    *,
    dataset: str | None = None,
    path: Path | None = None,
    split: str | None = None,
    question: str | None = None,
    answer: str | None = None,
    gold: Gold | None = None,
    level: str | None = None,
    subject: str | None = None,
    test_share: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    apart: Sequence[str] | None = None,
    subjects: Sequence[str] = (),
    min_level: float | None = None,
    max_level: float | None = None,
    max_question_characters: Length | None = None,
    max_answer_characters: Length | None = None,
    order: Order = "shuffled",
    limit: Length | None = None,
    seed: Annotated[int, Field(ge=0)] = 0,
    suffix: str | None = None,
    system: str | None = None,
    examples: Annotated[int, Field(ge=0)] | Sequence[Example] = 0,
    format_weight: Annotated[float, Field(ge=0)] = 0.0,
    policies: Policies | None = None,
    grader: OwnGrader | None = None,
    revision: str | None = None,
    recorded: PinTasks = lambda now: now,
    note: Note = lambda message: None,
) -> Sequence[MathProblem]:
    r"""Problems of a dataset, or of a file, or of a file that holds a dataset.

    Args:
        dataset: a name of the catalogue. With `path` too, the file is read as that dataset's rows would be.
        path: a file of JSON lines, JSON, Parquet, CSV or TSV.
        split: of the dataset; by default `train`, where there is one, and else `test`. With `path`, what
            the file holds. With `test_share`, `train` or `test`.
        question: the column that holds it, by default `question` or the dataset's own.
        answer: the column that holds the right answer, by default `answer` or the dataset's own.
        gold: where in that column it stands: it is the `column`, the last `boxed` expression, or what follows `hash`
            marks, `####`.
        level: the column that says how hard it is.
        subject: the column that says of which field it is.
        test_share: of a set without splits, the share of problems that is kept for testing, by their text.
        apart: sets none of whose questions are among the tasks: `name`, `name:split`, or a file. By default those that
            the dataset is known to share problems with.
        subjects: only these.
        min_level: the least number in the level.
        max_level: the greatest.
        max_question_characters: only shorter questions.
        max_answer_characters: only shorter answers.
        order: of the tasks: `shuffled` by the seed, as `given`, or by level.
        limit: at most this many tasks.
        seed: of the order.
        suffix: follows each question; by default the dataset's own.
        system: the system's message.
        examples: how many of rlkit's worked examples are shown first, or examples of your own.
        format_weight: taken off the reward of a reply without a boxed answer, or cut off.
        policies: how answers are compared; by default as suits the dataset.
        grader: a function of your own: the reply's text and the right answer in, the reward out.
        revision: of the dataset, the commit on the hub that is read, instead of the one that rlkit knows.
        recorded: told at which commits datasets are read of which rlkit knows none; gives those of when the run began.
        note: told how many problems there are, and what was left out.

    Raises:
        UsageError: an argument makes no sense, a file cannot be read, or no problem is left.
        MissingError: the dataset is not on this machine, and the hub cannot be asked.
    """
    overrides = {"question": question, "answer": answer, "gold": gold, "level": level, "subject": subject}
    columns = {name: value for name, value in overrides.items() if value is not None}
    commits = _commits(dataset if path is None else None, apart, revision, recorded)
    source = _source(dataset, path, split, columns, commits=commits, test_share=test_share, note=note)
    about = source.dataset
    wanted = Wanted(
        tuple(subjects), min_level, max_level, max_question_characters, max_answer_characters, order, limit, seed
    )
    template = _template(about.template, suffix, system, examples)
    scoring = Scoring(format_weight, policies or about.policies, grader)
    if grader is not None and (format_weight or policies is not None):
        raise UsageError("grader: says what is paid for, so format_weight and policies have no effect beside it")
    selected = Count()
    taken = select(
        source.problems,
        wanted,
        apart=_questions(about.apart if apart is None else apart, commits, note),
        share=("test" if split == "test" else "train", test_share) if test_share else None,
        gradable=bool if grader is not None else validate,
        count=selected,
    )
    if not taken:
        raise UsageError(f"no problem of {source.name} is left: {selected}")
    note(f"{source.name}: {selected}")
    return [MathProblem(problem, source.name, template, scoring) for problem in taken]


def _source(
    name: str | None,
    path: Path | None,
    split: str | None,
    columns: dict[str, str],
    *,
    commits: Commits,
    test_share: float,
    note: Note,
) -> _Source:
    if name is None and path is None:
        raise UsageError(f"dataset: name one of {', '.join(DATASETS)}, or set path to a file")
    about = Dataset({}, "") if name is None else _dataset(name)
    if test_share and split not in ("train", "test"):
        raise UsageError("split: with test_share, say whether it is train or test")
    if path is not None:
        own = next(iter(about.splits.values()))[0].columns if about.splits else Columns("question", "answer")
        if split is not None and not test_share and split not in about.splits:
            raise UsageError(f"split: {path} has no split {split!r}; set test_share, or leave it out")
        own = replace(own, **columns)  # pyright: ignore[reportArgumentType]  texts, checked as arguments
        problems = read_problems(read_rows(path), own, where=f"path: {path}")
        return _Source(_named(name or path.stem, split), problems, about)
    assert name is not None  # one of the two is there
    if columns:
        raise UsageError(f"{next(iter(columns))}: has no effect, since the columns of {name} are known")
    if test_share and len(about.splits) > 1:
        raise UsageError(f"test_share: {name} has splits of its own: {', '.join(about.splits)}")
    chosen = next(iter(about.splits)) if split is None or test_share else split
    return _Source(_named(name, split or chosen), _problems(name, chosen, commits, note), about)


def _commits(name: str | None, apart: Sequence[str] | None, revision: str | None, recorded: PinTasks) -> Commits:
    """The commits of what the catalogue knows none of, and the one that the user wants."""
    if revision is not None and name is None:
        raise UsageError("revision: has no effect on a file: it is of a dataset on the hub")
    pinned = dict[str, str]()
    if revision is not None and not re.fullmatch("[0-9a-f]{40}", revision):
        raise UsageError(f"revision: {revision!r} is no commit, which has 40 digits from 0 to f; a branch may move")
    if name is not None and revision is not None:
        repositories = {table.repository for table in _tables(name)}
        if len(repositories) > 1:
            raise UsageError(f"revision: {name} is of several repositories: {', '.join(sorted(repositories))}")
        pinned = dict.fromkeys(repositories, revision)
    sets = [*([] if name is None else [name]), *(dataset.partition(":")[0] for dataset in apart or ())]
    unknown = {table.repository for known in DATASETS.keys() & sets for table in _tables(known) if not table.revision}
    now = {repository: newest(repository) for repository in sorted(unknown - set(pinned))}
    begun = cast("Commits", recorded(dict[str, Json](now))) if now else now
    return {**now, **begun, **pinned}


def _tables(name: str) -> Iterator[Table]:
    return chain.from_iterable(_dataset(name).splits.values())


def _named(name: str, split: str | None) -> str:
    return name if split is None else f"{name}:{split}"


def _dataset(name: str) -> Dataset:
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS)
        raise UsageError(f"dataset: there is no {name!r}.{hint} Known: {', '.join(DATASETS)}; for a file, set path")
    return DATASETS[name]


def _problems(name: str, split: str, commits: Commits, note: Note) -> Iterator[Problem | None]:
    """The problems of a split, numbered over all its tables."""
    about = _dataset(name)
    if split not in about.splits:
        raise UsageError(f"split: {name} has {', '.join(about.splits)}, and no {split!r}; test_share can make one")
    places = count()
    for table in about.splits[split]:
        rows = table_rows(replace(table, revision=commits.get(table.repository, table.revision)), note=note)
        for problem in read_problems(rows, table.columns, where=table.repository):
            place = next(places)
            yield problem and replace(problem, place=place, subject=table.subject or problem.subject)


def _questions(sets: Sequence[str], commits: Commits, note: Note) -> set[str]:
    """The normalised questions of sets that are kept apart."""
    questions = set[str]()
    for dataset in sets:
        name, _, split = dataset.partition(":")
        if name in DATASETS:
            problems = _problems(name, split or ("test" if "test" in DATASETS[name].splits else "train"), commits, note)
            questions |= {normalised(problem.question) for problem in problems if problem is not None}
        elif re.search(r"\.\w+$", dataset):
            questions |= {normalised(question) for question in _questions_of(Path(dataset))}
        else:
            hint = did_you_mean(name, DATASETS)
            raise UsageError(f"apart: {dataset!r} is neither a dataset nor a file.{hint}")
    return questions


def _questions_of(path: Path) -> Iterator[str]:
    for row in read_rows(path):
        column = next((name for name in _QUESTIONS if name in row), None)
        if column is None:
            raise UsageError(f"apart: {path} has no column {' or '.join(_QUESTIONS)}")
        yield str(row[column])


def _template(own: Template, suffix: str | None, system: str | None, examples: int | Sequence[Example]) -> Template:
    if isinstance(examples, int):
        if examples > len(EXAMPLES):
            raise UsageError(f"examples: there are {len(EXAMPLES)} worked examples; give your own for more")
        examples = EXAMPLES[:examples]
    return Template(own.suffix if suffix is None else suffix, own.system if system is None else system, tuple(examples))
