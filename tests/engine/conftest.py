"""Fixtures for tests that go through the real Tinker SDK."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
import torch

from rlkit.engine import EngineServer
from rlkit.errors import MissingError

from .tiny_models import write_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Matrices as small as those of the tests only lose by a second thread; servers choose for themselves.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": write_model(root / "llama", "llama"),
        "qwen2": write_model(root / "qwen2", "qwen2", tied=False),
        "qwen3": write_model(root / "qwen3", "qwen3", tied=False),
    }


@pytest.fixture(scope="session")
def resolve(models: dict[str, Path], byte_model_dir: Path) -> Callable[[str], Path]:
    """The tiny models by name, and one that has a tokeniser by the path of its directory."""
    folders = {**models, str(byte_model_dir): byte_model_dir}

    def resolve(name: str) -> Path:
        if name not in folders:
            raise MissingError(f"model {name!r} was not found")
        return folders[name]

    return resolve


@contextmanager
def connect(server: EngineServer) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=server.url, api_key=server.api_key) as client:
        yield client


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")


@pytest.fixture(scope="module")
def server(resolve: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    root = tmp_path_factory.mktemp("root")
    with EngineServer(root=root, resolve=resolve, models=["llama"], device="cpu") as server:
        yield server


@pytest.fixture
def client(server: EngineServer) -> Iterator[tinker.ServiceClient]:
    with connect(server) as client:
        yield client


@pytest.fixture
def rest(server: EngineServer) -> tinker.RestClient:
    return tinker.RestClient(base_url=server.url, api_key=server.api_key)
