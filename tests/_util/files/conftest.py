from __future__ import annotations

from pathlib import Path

import pytest

from tests._util.files.disk import Disk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Disk:
    return Disk(monkeypatch, tmp_path)
