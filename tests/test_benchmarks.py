"""Benchmarks use names of rlkit that exist; most of them take too long to be run by a test."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_names_of_rlkit_in_a_benchmark_exist(path: Path) -> None:
    nodes, modules = list(ast.walk(ast.parse(path.read_text()))), dict[str, ModuleType]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "rlkit":
            assert node.module is not None
            for alias in node.names:
                imported = find_name(node.module, alias.name)
                if isinstance(imported, ModuleType):
                    modules[alias.asname or alias.name] = imported
    used = [
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    ]
    missing = [
        f"{name}.{attribute}" for name, attribute in used if name in modules and not hasattr(modules[name], attribute)
    ]
    assert not missing


def find_name(module: str, name: str) -> object:
    """Return what `from module import name` imports."""
    imported = import_module(module)
    return getattr(imported, name) if hasattr(imported, name) else import_module(f"{module}.{name}")
