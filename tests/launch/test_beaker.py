"""Jobs that are submitted and followed, through beaker-py and a fake of Beaker's servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cli.conftest import rlkit
from tests.launch.fake_beaker import WORKLOAD, FakeBeaker

__all__ = ["rlkit"]

SUBMIT = ["launch", "beaker", "--code", "image", "--workspace", "me/mine", "--secret", "TINKER_API_KEY"]


@pytest.mark.filterwarnings("ignore:The 'preemptible' field is deprecated:DeprecationWarning")
def test_job_is_submitted_with_its_settings(fake: FakeBeaker, rlkit: Callable[..., Any]) -> None:
    words = ["rlkit", "train", "a.yaml", "x=[a, b]", "</answer>"]
    result = rlkit(*SUBMIT, "--experiment", "first", "--retries", "2", "--", *words)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{fake.address}/ex/{WORKLOAD}\n"
    (sent,) = fake.submitted
    assert (sent["workspace"], sent["name"]) == ("me-mine", "first")
    (task,) = sent["spec"]["tasks"]
    assert task["arguments"][: len(words)] == words
    assert task["context"] == {"priority": "normal", "preemptible": True}
    assert {"name": "TINKER_API_KEY", "secret": "TINKER_API_KEY"} in task["envVars"]
    assert sent["spec"]["retry"] == {"allowedTaskRetries": 2}


@pytest.mark.filterwarnings("ignore:The 'preemptible' field is deprecated:DeprecationWarning")
def test_preempted_job_is_followed_to_its_end(fake: FakeBeaker, rlkit: Callable[..., Any]) -> None:
    fake.jobs = [["step 1", "step 2"], ["resuming after step 2", "step 3"]]
    result = rlkit(*SUBMIT, "--follow", "--", "rlkit", "train", "a.yaml", "--name", "mine")
    assert result.exit_code == 0, result.stderr
    lines = result.stderr.splitlines()
    assert lines[-4:] == ["step 1", "step 2", "resuming after step 2", "step 3"]


@pytest.mark.filterwarnings("ignore:The 'preemptible' field is deprecated:DeprecationWarning")
@pytest.mark.parametrize("ends", ["failed", "canceled"])
def test_failed_job_is_a_failed_run(ends: str, fake: FakeBeaker, rlkit: Callable[..., Any]) -> None:
    fake.ends = ends
    result = rlkit(*SUBMIT, "--follow", "--", "false")
    assert result.exit_code == 1
    assert f"the job {ends}: {fake.address}/ex/{WORKLOAD}" in result.stderr


@pytest.mark.filterwarnings("ignore:The 'preemptible' field is deprecated:DeprecationWarning")
def test_rejection_by_beaker_is_one_line(fake: FakeBeaker, rlkit: Callable[..., Any]) -> None:
    fake.token = "another"
    result = rlkit(*SUBMIT, "--", "true")
    assert result.exit_code in (1, 3)
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in result.stderr
    assert "bug in rlkit" not in result.stderr
