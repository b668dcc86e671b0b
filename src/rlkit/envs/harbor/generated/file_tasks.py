"""Generated shell tasks on files, solvable with one or two commands; meant for very small models.

Invariant: `FileTasksSettings` fully determines the tasks. Training and held-out tasks share no name of a file or
folder, no word and no instruction.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rlkit._util.seeds import derive_seed

type Split = Literal["train", "held-out"]

SPLITS: tuple[Split, ...] = ("train", "held-out")

_TRAIN_NAMES = """
    apple bread cloud stone river music photo paper table green night chair water horse plant glass wheel smoke beach
    train clock storm brush flame grass heart juice knife lemon money north ocean piano queen radio salad tiger uncle
    voice whale yacht zebra angel bride cabin daisy earth fence
"""
_HELD_OUT_NAMES = """
    amber beard candy dream eagle field ghost honey image jewel kitty light mango nurse olive pearl quilt robot shell
    tower urban valve wagon youth
"""
NAMES: Mapping[Split, Sequence[str]] = {"train": _TRAIN_NAMES.split(), "held-out": _HELD_OUT_NAMES.split()}
"""Names of files and folders, and words in files; the two splits share none."""

MAX_VARIANTS = 20
"""Maximum number of tasks per kind and split, below the number of held-out names: each task needs its own name."""


type Variants = Annotated[int, Field(ge=1, le=MAX_VARIANTS)]


class FileTasksSettings(BaseModel):
    """Settings of generated tasks: number of tasks per kind in each split, and the seed of their names."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    variants: Variants = 12
    held_out: Variants = 4
    seed: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True)
class FileTask:
    """A task about files."""

    instruction: str
    solution: str  # commands, one per line
    # Calls of shell functions of `task_folders`, such as `is_gone x`; all succeed when the task is solved.
    checks: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict[str, str])  # contents of the initial files, by path
    task_id: str = ""  # `<split>/<level>-<kind>-<number>`


class _Names:
    """Distinct names, in an order determined by a seed."""

    def __init__(self, split: Split, rng: random.Random) -> None:
        self._unused = rng.sample(NAMES[split], len(NAMES[split]))
        self.rng = rng

    def word(self) -> str:
        return self._unused.pop()

    def file(self) -> str:
        return f"{self.word()}.txt"


def _make_folder(names: _Names) -> FileTask:
    name = names.word()
    return FileTask(f"Make a directory named {name}.", f"mkdir {name}", (f"is_folder {name}",))


def _delete_file(names: _Names) -> FileTask:
    name, other, word = names.file(), names.file(), names.word()
    files = {name: f"{names.word()}\n", other: f"{word}\n"}
    return FileTask(f"Delete the file {name}.", f"rm {name}", (f"is_gone {name}", f"holds {other} {word}"), files)


def _rename_file(names: _Names) -> FileTask:
    old, new, word = names.file(), names.file(), names.word()
    checks = (f"is_gone {old}", f"holds {new} {word}")
    return FileTask(f"Rename the file {old} to {new}.", f"mv {old} {new}", checks, {old: f"{word}\n"})


def _copy_file(names: _Names) -> FileTask:
    name, copy, word = names.file(), names.file(), names.word()
    checks = (f"holds {name} {word}", f"holds {copy} {word}")
    return FileTask(f"Copy the file {name} to {copy}.", f"cp {name} {copy}", checks, {name: f"{word}\n"})


def _write_word(names: _Names) -> FileTask:
    word, name = names.word(), names.file()
    instruction = f"Write the word {word} into the file {name}."
    return FileTask(instruction, f"echo {word} > {name}", (f"holds {name} {word}",))


def _append_word(names: _Names) -> FileTask:
    word, name, first = names.word(), names.file(), names.word()
    checks = (f"holds {name} {first} {word}",)
    instruction = f"Add the word {word} to the end of the file {name}."
    return FileTask(instruction, f"echo {word} >> {name}", checks, {name: f"{first}\n"})


def _empty_file(names: _Names) -> FileTask:
    name = names.file()
    return FileTask(f"Create an empty file named {name}.", f"touch {name}", (f"holds {name}",))


def _move_file(names: _Names) -> FileTask:
    name, folder, other, word = names.file(), names.word(), names.file(), names.word()
    checks = (f"is_gone {name}", f"holds {folder}/{name} {word}", f"holds {folder}/{other} {other[:-4]}")
    files = {name: f"{word}\n", f"{folder}/{other}": f"{other[:-4]}\n"}
    return FileTask(f"Move the file {name} into the directory {folder}.", f"mv {name} {folder}", checks, files)


def _sort_lines(names: _Names) -> FileTask:
    name, into, words = names.file(), names.file(), sorted(names.word() for _ in range(4))
    shuffled = names.rng.sample(words, len(words))
    if shuffled == words:
        shuffled.reverse()
    checks = (f"holds {name} {' '.join(shuffled)}", f"holds {into} {' '.join(words)}")
    instruction = f"Sort the lines of {name} into the file {into}."
    return FileTask(instruction, f"sort {name} > {into}", checks, {name: "".join(f"{word}\n" for word in shuffled)})


def _count_lines(names: _Names) -> FileTask:
    name, into, count = names.file(), names.file(), names.rng.randint(3, 12)
    text = "".join(f"{names.word()}\n" for _ in range(count))
    instruction = f"Count the lines of {name} and write the number into the file {into}."
    return FileTask(instruction, f"wc -l < {name} > {into}", (f"holds {into} {count}",), {name: text})


def _folder_and_file(names: _Names) -> FileTask:
    folder, name, word = names.word(), names.file(), names.word()
    instruction = f"Make a directory named {folder} and write the word {word} into the file {folder}/{name}."
    command = f"mkdir {folder} && echo {word} > {folder}/{name}"
    return FileTask(instruction, command, (f"holds {folder}/{name} {word}",))


def _number_lines(names: _Names) -> FileTask:
    name, last = names.file(), names.rng.randint(4, 30)
    numbers = " ".join(map(str, range(1, last + 1)))
    instruction = f"Write the numbers from 1 to {last} into the file {name}, one on each line."
    return FileTask(instruction, f"seq {last} > {name}", (f"holds {name} {numbers}",))


type _Kind = Callable[[_Names], FileTask]

_LEVEL_1 = (_make_folder, _delete_file, _rename_file, _copy_file, _write_word)


def _two_commands(names: _Names) -> FileTask:
    first, second = (make(names) for make in names.rng.sample(_LEVEL_1, 2))
    instruction = f"{first.instruction} Then {second.instruction[0].lower()}{second.instruction[1:]}"
    files = {**first.files, **second.files}
    return FileTask(instruction, f"{first.solution}\n{second.solution}", first.checks + second.checks, files)


_LEVELS: Sequence[Sequence[_Kind]] = (
    _LEVEL_1,
    (_append_word, _empty_file, _move_file, _sort_lines),
    (_two_commands,),
    (_count_lines, _folder_and_file, _number_lines),
)
"""Kinds of tasks by level: 1, one plain command; 2, one less common command; 3, two commands of level 1 in sequence;
4, several actions in one line of the shell. The names of the functions are in the ids of tasks."""


def generate_file_tasks(settings: FileTasksSettings) -> Iterator[FileTask]:
    """Yield the tasks, with ids such as `train/1-make-folder-00`."""
    for split in SPLITS:
        count = settings.variants if split == "train" else settings.held_out
        for level, kinds in enumerate(_LEVELS, start=1):
            for make in kinds:
                kind = make.__name__.lstrip("_").replace("_", "-")
                yield from _generate_variants(split, f"{level}-{kind}", count, settings.seed, make)


def _generate_variants(split: Split, kind: str, count: int, seed: int, make: _Kind) -> Iterator[FileTask]:
    instructions = set[str]()
    draw = 0
    while len(instructions) < count:
        task = make(_Names(split, random.Random(derive_seed(seed, "file_tasks", split, kind, draw))))
        draw += 1
        if task.instruction not in instructions:
            yield replace(task, task_id=f"{split}/{kind}-{len(instructions):02}")
            instructions.add(task.instruction)
