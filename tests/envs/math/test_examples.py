"""The examples for larger models are configurations that load, and play where their data is at hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlkit.check import check
from rlkit.config.loading.load import load_config
from rlkit.config.loading.objects import load_envs, load_object
from rlkit.envs.math.catalogue import DATASETS

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted((EXAMPLES / "maths").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_names_existing_datasets(path: Path) -> None:
    config = load_config([path]).config
    assert len(path.read_text().splitlines()) < 80
    for spec in [*config.envs.values(), *config.eval.envs.values()]:
        if spec.env == "math":
            about = DATASETS[str(spec.args["dataset"])]
            assert "test_share" in spec.args or spec.args.get("split", next(iter(about.splits))) in about.splits


@pytest.mark.parametrize("name", ["arithmetic.yaml", "maths/arithmetic.yaml", "copy_rule.yaml"])
def test_generated_environments_evaluate_on_held_out_tasks(name: str) -> None:
    config = load_config([EXAMPLES / name]).config
    (trained,), (tested,) = (
        [load_envs(key, spec, field=key, seed=0) for key, spec in specs.items()]
        for specs in (config.envs, config.eval.envs)
    )
    assert isinstance(trained, list)
    assert isinstance(tested, list)
    shared_pool = {env.task_id for env in trained} & {env.task_id for env in tested}
    assert bool(shared_pool) == (name == "arithmetic.yaml")  # it has all sums of one digit, to be learned by heart


def test_the_copying_environment_passes_the_environment_checks() -> None:
    letters = load_object(f"{EXAMPLES}/copy_rule.py:letters", field="envs")
    assert callable(letters)
    report = asyncio.run(check(letters(), tasks=2))
    assert report.ok, [finding for finding in report.findings if finding.status == "failed"]
