"""Published values: the file, the best of a problem, the documentation's table, and what prompts state."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest

from rlkit.envs.discovery import PROBLEMS, discovery, make_problem
from rlkit.envs.discovery.literature import PUBLISHED, PublishedValue, read_published
from rlkit.envs.discovery.problem import Problem, load_published
from rlkit.envs.discovery.problems.erdos import Erdos
from rlkit.envs.discovery.problems.packing import CirclePacking
from rlkit.envs.discovery.problems.subsets import Kissing, NoIsosceles
from rlkit.envs.discovery.verification import verify_witness
from rlkit.errors import ConfigError, UsageError
from tests.envs.discovery.test_archive import Number
from tests.test_docs import ROOT


@pytest.mark.parametrize("published", read_published(), ids=str)
def test_a_published_value_belongs_to_a_problem_and_its_construction_has_it(published: PublishedValue) -> None:
    assert published.problem in PROBLEMS
    problem = make_problem(published.problem, {**published.options})
    assert (published in problem.published) == (not published.withdrawn)
    if published.file:
        value = verify_witness(published.problem, PUBLISHED / f"{published.file}.json", options=published.options).value
        digits = min(len(published.value.partition(".")[2]), 15)  # of a float
        assert abs(value - float(published.value)) < 10.0**-digits


@pytest.mark.parametrize(
    "problem",
    [
        *(make_problem(name, {}) for name in PROBLEMS),
        CirclePacking(32),
        CirclePacking(21, "rectangle"),
        NoIsosceles(32),
    ],
)
def test_the_best_known_value_is_never_better_than_the_published_one(problem: Problem) -> None:
    values = [Fraction(value.value) for value in problem.published]
    assert problem.best_known is not None
    by_hand = any(value.by_hand for value in problem.published)
    assert by_hand != isinstance(problem, NoIsosceles)  # which only models have searched
    best = min(values) if problem.minimise else max(values)
    gap = (Fraction(problem.best_known) - best) * (1 if problem.minimise else -1)
    assert 0 <= gap < Fraction(1, 10**15)


def test_a_withdrawn_value_is_not_the_best() -> None:
    withdrawn = [value.value for value in read_published() if value.withdrawn]
    assert withdrawn == ["0.380856", "2.365832385"]
    assert Erdos().published[0].value == "0.3808563308462765"
    assert CirclePacking(21, "rectangle").published[0].value == "2.3658323759"


def test_values_belong_to_their_options() -> None:
    assert CirclePacking(26).published[0].value == "2.635983084919"
    assert (
        CirclePacking(26, "rectangle").best_known is CirclePacking(21).best_known is CirclePacking(5).best_known is None
    )
    assert [value.value for value in Kissing(11).published] == ["604", "593", "592"]
    assert [value.problem for value in Number().published] == []


def test_the_table_of_the_documentation_has_the_published_values() -> None:
    rows = [
        f"| `{value.problem}`{''.join(f', {name} {option}' for name, option in value.options.items())} | {value.value} "
        f"| {value.who}, {value.date} | {value.witness} | {value.verified} |"
        for value in read_published()
        if not value.withdrawn
    ]
    text = (ROOT / "docs" / "discovery.md").read_text()
    assert "\n".join(rows) in text, "\n".join(rows)


@pytest.mark.parametrize("problem", ["erdos"])
def test_the_table_of_the_documentation_has_the_values_of_the_scripted_search(problem: str) -> None:
    text = (ROOT / "docs" / "discovery.md").read_text()
    for seconds, value in make_problem(problem, {}).scripted[1:]:  # the first is for runs of a few seconds
        assert f"| {seconds} | {value:.6f} |" in text


def prompt_of(**arguments: object) -> str:
    return str(discovery(start="erdos_haugland_2016", **arguments).next().prompt()[0]["content"])  # pyright: ignore


def test_a_prompt_states_no_record_by_default() -> None:
    text = prompt_of()
    assert "with C5 = 0.3809268534. Improve on it" in text
    assert not any(value.value in text for value in Erdos().published)


def test_a_prompt_states_the_record_and_a_target_if_they_are_wanted() -> None:
    text = prompt_of(prompt={"record": True, "target": 0.3808})
    assert "The best published value is 0.3808563308462765. The target is 0.3808. Improve on it" in text
    assert "by hand" not in text


@dataclass(frozen=True)
class Unknown(Number):
    """A problem without published values."""


def test_a_record_that_is_not_known_cannot_be_stated() -> None:
    with pytest.raises(UsageError, match=r"prompt\.record: number has no published value"):
        discovery(problem=Unknown(), prompt={"record": True})


@pytest.mark.parametrize("contents", ["{recrod: true}", "{target: low}", "{target: .nan}"])
def test_unknown_contents_of_a_prompt_are_an_error(contents: str) -> None:
    from rlkit.config.loading.load import load_config
    from rlkit.config.loading.objects import load_envs

    with pytest.raises(ConfigError, match="prompt"):
        spec = load_config([], ["envs.d.env=discovery", f"envs.d.args.prompt={contents}"]).config.envs["d"]
        load_envs("d", spec, field="envs.d", seed=0)


@pytest.mark.parametrize("values", ["[1" + "0" * 400 + "]", "[" * 100_000, '[0.5, "0.5"]', "[true]", "[0, null]"])
def test_a_start_without_floats_is_an_error_that_names_the_file(values: str, tmp_path: Path) -> None:
    path = tmp_path / "start.json"
    path.write_text(f'{{"values": {values}}}')
    with pytest.raises(UsageError, match=r"start\.json has no array of numbers under `values`"):
        load_published(str(path))
