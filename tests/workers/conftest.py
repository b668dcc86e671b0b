from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_loaded_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers load the files that their process has loaded: none that belongs to another test."""
    monkeypatch.setattr("rlkit.config.loading.objects._loaded", {})
