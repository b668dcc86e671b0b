"""Names and docstrings stand alone: ratchets over the package, which may only fall."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BARE_NAMES = frozenset(
    {
        "apart",
        "asked",
        "begun",
        "drawn",
        "ended",
        "found",
        "given",
        "gone",
        "held",
        "kept",
        "known",
        "least",
        "made",
        "meant",
        "most",
        "one",
        "ours",
        "own",
        "said",
        "seen",
        "shown",
        "taken",
        "thing",
        "told",
        "tried",
        "wanted",
    }
)
"""Participles and pronouns that do not say what they name."""

BARE_FUNCTIONS = BARE_NAMES | frozenset(
    {
        "answered",
        "awaited",
        "blamed",
        "bounded",
        "centred",
        "chosen",
        "clipped",
        "computed",
        "configured",
        "described",
        "estimated",
        "fitted",
        "joined",
        "listed",
        "loaded",
        "merged",
        "named",
        "needed",
        "normalized",
        "placed",
        "redacted",
        "restored",
        "settled",
        "used",
    }
)
OPENERS = frozenset(
    {
        "As",
        "How",
        "Likewise",
        "Of",
        "One",
        "What",
        "When",
        "Where",
        "Whether",
        "Which",
        "Who",
        "Those",
        "Whose",
        "Why",
    }
)
"""Words with which a docstring would lean on the name above it."""

NOUN_FUNCTIONS_MAX = 16
"""Functions named by a noun and `of`, such as `price_of`. This number may only fall."""

FUNCTION_LINES_MAX = 60
LONG_FUNCTIONS = {"beaker", "harbor", "openreward"}
"""Functions past the limit: their signatures are the options of a command, or the settings of an environment."""

SYNONYMS = {
    r"trajector(y|ies)": "episode",
    r"time ?steps?": "turn",
    r"roll-outs?": "rollout",
    r"gradient steps?": "step, or optimiser step",
    r"hyper-?parameters?": "setting",
    r"check-points?": "checkpoint",
    r"data ?points?": "datum",
}
"""Words that the documentation does not use, and the word of the glossary for each."""

NAMES_OF_OTHERS = re.compile(
    r"`[^`]*`|/\S+\.json|Terminus2's own trajectory|a trajectory that Terminus wrote|the whole trajectory|"
    r"logs and trajectories"
)
"""Code, and the records of Harbor, which are called trajectories there."""


@cache
def trees() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text())) for path in sorted((ROOT / "src" / "rlkit").rglob("*.py")))


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path, tree in trees():
        for node in ast.walk(tree):
            yield path, node


def bound_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr.lstrip("_")
    return None


def place(path: Path, node: ast.AST, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text}"


def assert_share(offenders: list[str], total: int, limit: float) -> None:
    share = len(offenders) / total
    assert share <= limit, f"{share:.2%} of {total}, and {limit:.2%} are allowed:\n" + "\n".join(offenders)


def test_variables_arguments_and_fields_say_what_they_are() -> None:
    names = [
        (path, node, name) for path, node in nodes() if (name := bound_name(node)) not in (None, "self", "cls", "_")
    ]
    offenders = [place(path, node, str(name)) for path, node, name in names if name in BARE_NAMES]
    assert_share(offenders, len(names), 0.003)


def test_functions_are_named_by_verbs() -> None:
    functions = [(path, node) for path, node in nodes() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    offenders = [place(path, node, node.name) for path, node in functions if node.name.lstrip("_") in BARE_FUNCTIONS]
    assert_share(offenders, len(functions), 0.01)
    nouns = [place(path, node, node.name) for path, node in functions if node.name.endswith("_of")]
    assert len(nouns) <= NOUN_FUNCTIONS_MAX, "\n".join(nouns)


def test_docstrings_open_with_an_imperative_or_a_noun() -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    texts = [
        (path, node, text) for path, node in nodes() if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]
    offenders = [
        place(path, node, text.splitlines()[0])
        for path, node, text in texts
        if text.split()[0].strip(".,:;") in OPENERS
    ]
    assert_share(offenders, len(texts), 0.03)


def test_functions_are_short() -> None:
    long = Counter(
        node.name
        for _, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES_MAX
    )
    assert set(long) <= LONG_FUNCTIONS


@pytest.mark.parametrize("page", sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]), ids=str)
def test_pages_use_one_word_for_one_thing(page: Path) -> None:
    text = NAMES_OF_OTHERS.sub("", page.read_text())
    for synonym, word in SYNONYMS.items():
        match = re.search(rf"\b{synonym}\b", text, re.IGNORECASE)
        assert match is None, f"{page.relative_to(ROOT)}: {match and match.group()!r}: the glossary says {word}"


def test_subjects_of_commits_are_short() -> None:
    base = "07b4fa0"  # the commits before are as they are
    command = ["git", "log", "--format=%s", f"{base}..HEAD"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if log.returncode:
        pytest.skip("the history of the repository is not here")
    assert not [subject for subject in log.stdout.splitlines() if len(subject) > 72]
