r"""Maths datasets as tasks: datasets of the catalogue by name, and tables in files.

Invariant: no task repeats a question of a set in `exclude`, and the gold answer of each task can be graded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Annotated, cast

from pydantic import Field

from rlkit._util.sections import Positive
from rlkit.envs.math.catalogue import DATASETS, Columns, Dataset, Gold, Table
from rlkit.envs.math.grader import Policies, validate
from rlkit.envs.math.hub_tables import newest_commit, table_rows
from rlkit.envs.math.problems import Problem, normalise_question, read_problems
from rlkit.envs.math.prompts import EXAMPLES, Example, Template
from rlkit.envs.math.selection import Order, Selection, Share, select
from rlkit.envs.math.table_files import read_rows
from rlkit.envs.math.task import MathProblem, RewardFunction, Scoring
from rlkit.errors import UsageError, did_you_mean
from rlkit.tasks.provenance import PinTasks
from rlkit.types import Json

type Note = Callable[[str], None]
type Commits = Mapping[str, str]  # commit by repository, where it differs from the catalogue's

_QUESTION_COLUMNS = ("question", "problem", "prompt")  # columns that may hold the questions of a file in `exclude`


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
    exclude: Sequence[str] | None = None,
    subjects: Sequence[str] = (),
    min_level: float | None = None,
    max_level: float | None = None,
    max_question_characters: Positive | None = None,
    max_answer_characters: Positive | None = None,
    order: Order = "shuffled",
    limit: Positive | None = None,
    seed: Annotated[int, Field(ge=0)] = 0,
    suffix: str | None = None,
    system: str | None = None,
    examples: Annotated[int, Field(ge=0)] | Sequence[Example] = 0,
    format_weight: Annotated[float, Field(ge=0)] = 0.0,
    policies: Policies | None = None,
    grader: RewardFunction | None = None,
    revision: str | None = None,
    pin: PinTasks = lambda current: current,
    note: Note = lambda message: None,
) -> Sequence[MathProblem]:
    r"""Return the problems of a dataset or of a file as tasks; `docs/maths.md` describes every argument.

    Args:
        dataset: name in the catalogue. With `path` too, the file has the columns of that dataset.
        split: by default `train`, or `test` if there is no `train`. Required with `test_share`: `train` or `test`.
        exclude: sets whose questions are excluded: `name`, `name:split`, or a file; by default those of the catalogue.
        pin: replaces the newest commits of datasets without a fixed commit by those recorded when the run began.

    Raises:
        UsageError: an argument makes no sense, a file cannot be read, or no problem is left.
        MissingError: the dataset is not on this machine, and the hub cannot be reached.
    """
    columns = {"question": question, "answer": answer, "gold": gold, "level": level, "subject": subject}
    commits = _resolve_commits(dataset if path is None else None, exclude, revision, pin)
    source, entry, rows = _open_source(dataset, path, split, columns, commits, test_share=test_share, note=note)
    template = _make_template(entry.template, suffix, system, examples)
    if grader is not None and (format_weight or policies is not None):
        raise UsageError("grader: it returns the reward, so format_weight and policies have no effect with it")
    scoring = Scoring(format_weight, policies or entry.policies, grader)
    share: Share | None = ("test" if split == "test" else "train", test_share) if test_share else None
    selection = Selection(
        subjects, min_level, max_level, max_question_characters, max_answer_characters, order, limit, seed, share
    )
    excluded = _read_questions(entry.exclude if exclude is None else exclude, commits, note)
    is_gradable = bool if grader is not None else validate  # a custom grader takes any answer that is not empty
    problems, counts = select(rows, selection, excluded=excluded, is_gradable=is_gradable)
    if not problems:
        raise UsageError(f"no problem of {source} is left: {counts}")
    note(f"{source}: {counts}")
    return [MathProblem(problem, source, template, scoring) for problem in problems]


def _open_source(
    name: str | None,
    path: Path | None,
    split: str | None,
    columns: Mapping[str, str | None],
    commits: Commits,
    *,
    test_share: float,
    note: Note,
) -> tuple[str, Dataset, Iterator[Problem | None]]:
    """Return the name of a dataset in messages and task ids, its entry (empty for a file), and its problems."""
    if name is None and path is None:
        raise UsageError(f"dataset: set it to one of {', '.join(DATASETS)}, or set path to a file")
    overrides = {column: label for column, label in columns.items() if label is not None}
    dataset = Dataset({}, "") if name is None else _find_dataset(name)
    if test_share and split not in ("train", "test"):
        raise UsageError("split: with test_share, set it to train or test")
    if path is not None:
        default = next(iter(dataset.splits.values()))[0].columns if dataset.splits else Columns("question", "answer")
        if split is not None and not test_share and split not in dataset.splits:
            raise UsageError(f"split: {path} has no split {split!r}; set test_share, or leave out split")
        file_columns = replace(default, **overrides)  # pyright: ignore[reportArgumentType]  texts, checked as arguments
        problems = read_problems(read_rows(path), file_columns, where=f"path: {path}")
        return _join_split(name or path.stem, split), dataset, problems
    assert name is not None  # `name` or `path` is set
    if overrides:
        raise UsageError(f"{next(iter(overrides))}: has no effect: the columns of the dataset {name} are fixed")
    if test_share and len(dataset.splits) > 1:
        raise UsageError(f"test_share: {name} has splits of its own: {', '.join(dataset.splits)}")
    catalogue_split = next(iter(dataset.splits)) if split is None or test_share else split
    problems = _read_split(name, catalogue_split, commits, note)
    return _join_split(name, split or catalogue_split), dataset, problems


def _resolve_commits(name: str | None, exclude: Sequence[str] | None, revision: str | None, pin: PinTasks) -> Commits:
    """Return the commits of repositories that the catalogue does not fix, and the commit that `revision` selects."""
    if revision is not None and name is None:
        raise UsageError("revision: has no effect on a file; it selects a commit of a dataset on the hub")
    selected = dict[str, str]()
    if revision is not None and not re.fullmatch("[0-9a-f]{40}", revision):
        raise UsageError(f"revision: {revision!r} is not a commit of 40 hexadecimal digits; a branch may move")
    if name is not None and revision is not None:
        repositories = {table.repository for table in _list_tables(name)}
        if len(repositories) > 1:
            raise UsageError(f"revision: {name} has several repositories: {', '.join(sorted(repositories))}")
        selected = dict.fromkeys(repositories, revision)
    sets = [*([] if name is None else [name]), *(dataset.partition(":")[0] for dataset in exclude or ())]
    tables = chain.from_iterable(map(_list_tables, DATASETS.keys() & sets))
    unpinned = {table.repository for table in tables if not table.revision}.difference(selected)
    newest = {repository: newest_commit(repository) for repository in sorted(unpinned)}
    recorded = cast("Commits", pin(dict[str, Json](newest))) if newest else newest
    return {**newest, **recorded, **selected}


def _list_tables(name: str) -> Iterator[Table]:
    return chain.from_iterable(_find_dataset(name).splits.values())


def _join_split(name: str, split: str | None) -> str:
    return name if split is None else f"{name}:{split}"


def _find_dataset(name: str) -> Dataset:
    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS)
        raise UsageError(f"dataset: there is no {name!r}.{hint} Known: {', '.join(DATASETS)}; for a file, set path")
    return DATASETS[name]


def _read_split(name: str, split: str, commits: Commits, note: Note) -> Iterator[Problem | None]:
    """Yield the problems of a split, numbered over all its tables; None for a row without one."""
    dataset = _find_dataset(name)
    if split not in dataset.splits:
        raise UsageError(
            f"split: {name} has {', '.join(dataset.splits)}, and no {split!r}; set test_share to create one"
        )
    places = count()
    for table in dataset.splits[split]:
        rows = table_rows(replace(table, revision=commits.get(table.repository, table.revision)), note=note)
        for problem in read_problems(rows, table.columns, where=table.repository):
            place = next(places)
            yield problem and replace(problem, place=place, subject=table.subject or problem.subject)


def _read_questions(sets: Sequence[str], commits: Commits, note: Note) -> set[str]:
    """Return the normalised questions of datasets and files."""
    questions = set[str]()
    for dataset in sets:
        name, _, split = dataset.partition(":")
        if name in DATASETS:
            split = split or ("test" if "test" in DATASETS[name].splits else "train")
            problems = _read_split(name, split, commits, note)
            questions |= {normalise_question(problem.question) for problem in problems if problem is not None}
        elif re.search(r"\.\w+$", dataset):
            questions |= {normalise_question(question) for question in _read_file_questions(Path(dataset))}
        else:
            hint = did_you_mean(name, DATASETS)
            raise UsageError(f"exclude: {dataset!r} is neither a dataset nor a file.{hint}")
    return questions


def _read_file_questions(path: Path) -> Iterator[str]:
    for row in read_rows(path):
        column = next((name for name in _QUESTION_COLUMNS if name in row), None)
        if column is None:
            raise UsageError(f"exclude: {path} has no column {' or '.join(_QUESTION_COLUMNS)}")
        yield str(row[column])


def _make_template(
    default: Template, suffix: str | None, system: str | None, examples: int | Sequence[Example]
) -> Template:
    if isinstance(examples, int):
        if examples > len(EXAMPLES):
            raise UsageError(f"examples: there are {len(EXAMPLES)} worked examples; give your own for more")
        examples = EXAMPLES[:examples]
    return Template(
        default.suffix if suffix is None else suffix, default.system if system is None else system, tuple(examples)
    )
