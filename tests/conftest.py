from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

import rlkit.engine  # noqa: F401  before torch is loaded: it tells torch's threads not to spin
from rlkit.testing import byte_model

# On a busy machine an example may take long to make; that says nothing about what is tested.
settings.register_profile("rlkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlkit")

# The commands that tests start share what is compiled once: torch and transformers take longer to compile than to use.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What a shell starts in the background ignores interrupts, and so would all that it starts; tests send them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A session of an earlier test, whose server is gone, warns for minutes, in the log of whichever test then runs.
logging.getLogger("tinker.lib.internal_client_holder").addFilter(
    lambda record: "Session heartbeat failed" not in record.getMessage()
)

# Trackio reads it when it is imported, whichever test that does: none may write among the user's own.
os.environ["TRACKIO_DIR"] = str(Path(tempfile.gettempdir()) / f"rlkit-tests-{os.getuid()}" / "trackio")

_NUMBERS = count()


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test reads or writes the user's runs, nor finds the user's credentials."""
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path_factory.getbasetemp() / f"runs-{next(_NUMBERS)}"))
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_CREDENTIAL_CMD", "RLKIT_ENGINE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    # What the engine promises bit for bit, it promises on the CPU; tests that want a GPU ask for it.
    monkeypatch.setattr("rlkit.engine.kernels.devices.has_gpu", lambda: False)
    yield


def find_third(item: pytest.Item) -> int | None:
    """Return which third of the tests marked `slow` or `rotated` a test belongs to; None for another test."""
    is_rotated = any(item.get_closest_marker(mark) for mark in ("slow", "rotated"))
    return crc32(item.nodeid.encode()) % 3 if is_rotated else None


INSTALLING_FILES = {"test_openenv.py", "test_verifiers.py", "test_verifiers_env.py"}
"""Files whose slow tests install large packages, which takes minutes each: `RLKIT_TEST_INSTALLS=1` runs them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (third := os.environ.get("RLKIT_TEST_THIRD")) is not None:
        others = {item for item in items if find_third(item) not in (None, int(third))}
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))
    if os.environ.get("RLKIT_TEST_INSTALLS"):
        return
    for item in items:
        if item.path.name in INSTALLING_FILES and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="RLKIT_TEST_INSTALLS is not set"))


@pytest.fixture(scope="session")
def byte_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The byte-level test model: one token a byte, 131,776 parameters."""
    return byte_model(tmp_path_factory.mktemp("models") / "byte")
