"""The layout of the package: imports point down, folders are small, and nothing goes round in a circle."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "rlkit"

FLOORS = (
    ("types", "errors"),
    ("_util", "endpoint"),
    ("policy",),
    ("algorithms", "env", "engine", "sandbox"),
    ("config",),
    ("cost", "launch", "metrics", "tasks", "token_records", "tokenizers"),
    ("chat", "service", "store"),
    ("rollout", "tinker_client"),
    ("serving", "testing", "workers"),
    ("envs",),
    ("view",),
    ("check", "conformance", "trackers"),
    ("evaluation", "redteam"),
    ("interop", "judges", "training"),
    ("api", "dry_run", "tools"),
    ("cli",),
    ("__main__",),
)
"""From the bottom. A module imports from its own folder and from floors below; imports for types alone count too."""

ROOT_MODULES = {"types", "env", "policy", "errors", "api"}
FOLDER_MAX = 14
MODULE_LINES_MAX = 400

TRUNK = ROOT_MODULES | {"chat", "rollout", "tasks", "algorithms", "training", "store", "service"}
"""What a newcomer must read, beside the configuration."""

TRUNK_MAX = 7_500
"""Lines of the trunk that are not blank. This number may only fall, but for what an issue adds: so far teachers, roles,
conversations, and the parts of a service that a run needs."""


@dataclass(frozen=True)
class Import:
    """An import of one module of the package by another."""

    path: Path
    line: int
    importer: str
    imported: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT.parents[1])}:{self.line}: {self.importer} imports {self.imported}"


@cache
def modules() -> Mapping[str, Path]:
    """The package's modules by their dotted names below `rlkit`; scripts that run inside a sandbox are one folder."""
    paths = dict[str, Path]()
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path != ROOT / "__init__.py" and "templates" not in parts:
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def imported_modules(node: ast.AST, importer: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:  # only scripts inside a sandbox, which run without the package
            package = importer.split(".")[: -node.level]
            base = ".".join(["rlkit", *package, *([node.module] if node.module else [])])
        names = [f"{base}.{alias.name}" for alias in node.names]
    else:
        return
    for name in names:
        if name.startswith("rlkit."):
            inner = name.removeprefix("rlkit.")
            yield inner if inner in modules() else inner.rpartition(".")[0]


def imported_packages(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.partition(".")[0] for name in names}


@cache
def imports() -> tuple[Import, ...]:
    return tuple(
        Import(path, getattr(node, "lineno", 0), importer, imported)
        for importer, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        for imported in imported_modules(node, importer)
        if imported and imported != importer
    )


def unit_of(module: str) -> str:
    """The folder or root module that a module belongs to."""
    return module.partition(".")[0]


def test_imports_point_down() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    upward = [
        edge
        for edge in imports()
        if unit_of(edge.importer) != unit_of(edge.imported)
        and floor[unit_of(edge.imported)] >= floor[unit_of(edge.importer)]
    ]
    assert not upward, "\n".join(map(str, upward))


def test_the_trunk_imports_no_tool_no_environment_and_no_command() -> None:
    outside = {"tools", "dry_run", "envs", "cli", "check", "redteam"}
    crossing = [
        edge
        for edge in imports()
        if unit_of(edge.importer) in TRUNK | {"config"}
        and (unit_of(edge.imported) in outside or edge.imported == "evaluation.openai_endpoint")
    ]
    assert not crossing, "\n".join(map(str, crossing))


def test_only_the_tinker_client_imports_the_sdk() -> None:
    # They need the SDK itself.
    others = ("engine.server", "testing", "conformance", "tools.doctor", "tools.engine_probe")
    importers = {name for name, path in modules().items() if "tinker" in imported_packages(path)}
    assert {name for name in importers if not name.startswith(("tinker_client", *others))} == set()


def test_only_the_composition_of_a_run_imports_the_tinker_client() -> None:
    crossing = [
        edge
        for edge in imports()
        if unit_of(edge.importer) in TRUNK | {"config"}
        and unit_of(edge.imported) == "tinker_client"
        and edge.importer != "training.trainer"
    ]
    assert not crossing, "\n".join(map(str, crossing))


def test_the_trunk_does_not_grow() -> None:
    paths = [path for name, path in modules().items() if unit_of(name) in TRUNK]
    lines = sum(1 for path in paths for line in path.read_text().splitlines() if line.strip())
    assert lines <= TRUNK_MAX


def test_every_folder_has_its_floor() -> None:
    assert Counter(name for names in FLOORS for name in names) == Counter({unit_of(name) for name in modules()})


@pytest.mark.parametrize("folder", sorted({name.rpartition(".")[0] for name in modules()}))
def test_imports_within_a_folder_have_no_cycle(folder: str) -> None:
    prefix = f"{folder}." if folder else ""
    below = defaultdict[str, set[str]](set)
    for edge in imports():
        if edge.importer.startswith(prefix) and edge.imported.startswith(prefix):
            pair = unit_of(edge.importer.removeprefix(prefix)), unit_of(edge.imported.removeprefix(prefix))
            if pair[0] != pair[1]:
                below[pair[0]].add(pair[1])
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        lines = [
            str(edge)
            for edge in imports()
            for above, under in zip(circle[1:], circle, strict=False)
            if edge.importer.startswith(prefix + above) and edge.imported.startswith(prefix + under)
        ]
        pytest.fail(f"{' -> '.join(reversed(circle))}:\n" + "\n".join(lines))


def test_modules_have_no_import_cycle() -> None:
    below = defaultdict[str, set[str]](set)
    for edge in imports():
        below[edge.importer].add(edge.imported)
    try:
        TopologicalSorter(below).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_folders_are_small() -> None:
    names = [name for name, path in modules().items() if path.name != "__init__.py"]
    sizes = Counter(name.rpartition(".")[0] for name in names)
    large = {folder: size for folder, size in sizes.items() if size > FOLDER_MAX}
    assert not large, f"at most {FOLDER_MAX} modules in a folder; split {large}"


def test_modules_are_short() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    long = {name: length for name, length in lengths.items() if length > MODULE_LINES_MAX}
    assert not long, f"at most {MODULE_LINES_MAX} lines in a module; split {long}"


def test_root_holds_only_the_trunk_of_the_api() -> None:
    root = {path.stem for path in ROOT.glob("*.py")} - {"__init__", "__main__"}
    assert root == ROOT_MODULES
