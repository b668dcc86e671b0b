"""Whole commands in processes of their own, with the real engine and a tiny random model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rlkit.testing import byte_model
from rlkit.tools.scaffold import scaffold
from tests.limits import HANG_S

RLKIT = [sys.executable, "-m", "rlkit"]


@pytest.mark.slow
def test_interrupted_run_saves_and_prints_how_to_resume(tmp_path: Path) -> None:
    scaffold(tmp_path / "project", name="largest")
    model = byte_model(tmp_path / "model")
    arguments = ["config.yaml", f"model={model}", "steps=100000", "batch.groups=2", "eval.every=0"]
    with subprocess.Popen(
        [*RLKIT, "train", *arguments, "--name", "first", "--json"],
        cwd=tmp_path / "project",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        records = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.send_signal(signal.SIGINT)
        records += [json.loads(line) for line in process.stdout]
        notes = process.stderr.read()
        assert process.wait() == 130, notes
    result = records[-1]
    steps = result["steps"]
    assert [record["step"] for record in records[:-1]] == list(range(steps + 1))
    assert result["status"] == "interrupted"
    assert "finishing this step, then saving" in notes
    assert "to resume: rlkit resume first\n" in notes
    assert json.loads((tmp_path / "runs" / "first" / "run.json").read_text())["status"] == "interrupted"


def test_serve_prints_its_address_and_stops_on_sigterm() -> None:
    with subprocess.Popen([*RLKIT, "serve"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        match = re.fullmatch(r"export TINKER_BASE_URL=(\S+)\nexport TINKER_API_KEY=(tml-\S+)\n", "".join(lines))
        assert match is not None, lines
        health = httpx.get(f"{match[1]}/api/v1/healthz", headers={"x-api-key": match[2]})
        assert health.is_success
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0


@pytest.mark.slow
def test_doctor_passes_on_this_machine_without_printing_secrets(tmp_path: Path) -> None:
    environ = {**os.environ, "WANDB_API_KEY": "canary-0123456789"}
    completed = subprocess.run(
        [*RLKIT, "doctor", "--json"], capture_output=True, text=True, timeout=HANG_S, check=False, env=environ
    )
    findings = {finding["subject"]: finding for finding in json.loads(completed.stdout)["findings"]}
    assert findings["engine"]["status"] == "ok", findings["engine"]
    assert "WANDB_API_KEY" in findings["keys"]["detail"]
    assert "canary" not in completed.stdout + completed.stderr
    assert completed.returncode == (0 if json.loads(completed.stdout)["ok"] else 3)
