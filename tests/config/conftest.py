from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rlkit.config.loading.load import load_config
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.errors import ConfigError

type Load = Callable[..., ResolvedConfig]
type Refused = Callable[..., str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def load() -> Load:
    """Loads the text of one file, written as a.yaml in the working directory."""

    def load(text: str | bytes, *overrides: str, environ: Mapping[str, str] | None = None) -> ResolvedConfig:
        Path("a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config([Path("a.yaml")], overrides, environ=environ or {})

    return load


@pytest.fixture
def refused(load: Load) -> Refused:
    """Loads a file that must be refused, and gives the message."""

    def refused(text: str | bytes, *overrides: str, environ: Mapping[str, str] | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides, environ=environ)
        return str(caught.value)

    return refused
