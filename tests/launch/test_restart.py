from __future__ import annotations

import pytest

from rlkit.launch.job import make_restartable


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("rlkit train a.yaml", "rlkit train a.yaml --name new --resume"),
        ("rlkit train a.yaml --name mine", "rlkit train a.yaml --name mine --resume"),
        ("rlkit train a.yaml name=mine --resume", "rlkit train a.yaml name=mine --resume"),
        ("uv run rlkit train a.yaml", "uv run rlkit train a.yaml --name new --resume"),
        ("python -m rlkit train a.yaml", "python -m rlkit train a.yaml --name new --resume"),
        ("/app/.venv/bin/rlkit train a.yaml", "/app/.venv/bin/rlkit train a.yaml --name new --resume"),
        ("rlkit train a.yaml --dry-run", "rlkit train a.yaml --dry-run"),
        ("rlkit resume mine", "rlkit resume mine"),
        ("python train.py", "python train.py"),
    ],
)
def test_a_run_that_is_trained_gets_a_name_and_goes_on(command: str, expected: str) -> None:
    assert make_restartable(command.split(), name="new") == expected.split()
