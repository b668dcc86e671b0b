from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.fake_beaker import FakeBeaker, fake_beaker


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBeaker]:
    """A fake of Beaker's servers, which beaker-py takes for Beaker."""
    pytest.importorskip("beaker")
    import grpc  # pyright: ignore[reportMissingTypeStubs]

    monkeypatch.setattr(grpc, "secure_channel", lambda address, credentials, options: grpc.insecure_channel(address))
    monkeypatch.setattr("rlkit.launch.beaker._POLL_S", 0.01)
    monkeypatch.delenv("BEAKER_TOKEN", raising=False)
    with fake_beaker(FakeBeaker()) as server:
        monkeypatch.setenv("BEAKER_CONFIG", str(server.config(tmp_path / "beaker.yml")))
        yield server
