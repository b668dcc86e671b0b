"""The embedded engine conforms to the protocol."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit._util.model_names import DEFAULT_MODEL
from rlkit.conformance import ServiceReport, check_service
from rlkit.engine import EngineServer
from rlkit.testing import byte_model
from tests.engine.test_families import QWEN35, make
from tests.engine.tiny_models import write_model


def _find_exceptions(report: ServiceReport) -> dict[str, str]:
    return {f"{r.part}: {r.name}": f"{r.status}: {r.detail}" for r in report.results if r.status != "works"}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "quick"), [("llama", False), ("qwen3_5_text", True)])
def test_the_checks_pass_on_a_tiny_model(
    family: str, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    if family == "llama":
        folder = write_model(byte_model(tmp_path / "m"))  # its tokenizer makes text that can be printed
    else:
        folder = make(tmp_path / "m", family, **QWEN35, vocab_size=259, max_position_embeddings=1024)
    notes = list[str]()
    with EngineServer(root=tmp_path / "engine", resolve=lambda name: folder, models=["llama"], threads=1) as server:
        report = check_service(server.url, api_key=server.api_key, quick=quick, note=notes.append)
    assert _find_exceptions(report) == {}
    assert report.ok
    assert report.model == "llama"
    assert len(notes) == len(report.results) + 1
    assert report.usage.trained_tokens > report.usage.sampled_tokens > 0
    assert report.usd is None


@pytest.mark.slow
def test_the_quick_checks_pass_on_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with EngineServer(root=tmp_path / "engine") as server:
        report = check_service(server.url, api_key=server.api_key, model=DEFAULT_MODEL, quick=True)
    assert _find_exceptions(report) == {}
