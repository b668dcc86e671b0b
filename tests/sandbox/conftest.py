from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rlkit.errors import MissingError
from rlkit.sandbox import Limits, Sandbox, Spec, image

type Play = Callable[[Sandbox], Awaitable[None]]


@pytest.fixture(scope="session")
def sandbox_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sandbox-cache")


@pytest.fixture
def cache(sandbox_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache for sandboxes, in which nothing is left when the test is over."""
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(sandbox_cache))
    yield sandbox_cache
    assert left(sandbox_cache) == []


@pytest.fixture
def playing(cache: Path, can_sandbox: None) -> Callable[..., None]:
    """Play a coroutine function with a sandbox."""

    def play(function: Play, *, limits: Limits | None = None, network: bool = False) -> None:
        async def main() -> None:
            sandbox = await Sandbox.start(spec(limits=limits or Limits(), network=network))
            try:
                await function(sandbox)
            finally:
                await sandbox.stop()

        asyncio.run(main())

    return play


@pytest.fixture(scope="session")
def can_sandbox(sandbox_cache: Path) -> None:
    """Skips where the kernel refuses what a sandbox needs."""
    before = os.environ.get("RLKIT_CACHE_DIR")
    os.environ["RLKIT_CACHE_DIR"] = str(sandbox_cache)

    async def main() -> None:
        await (await Sandbox.start(spec())).stop()

    try:
        asyncio.run(main())
    except MissingError as error:
        pytest.skip(str(error))
    finally:
        os.environ.pop("RLKIT_CACHE_DIR")
        if before is not None:
            os.environ["RLKIT_CACHE_DIR"] = before


def spec(*, limits: Limits | None = None, network: bool = False) -> Spec:
    """A sandbox of the host's programs."""
    return Spec(trees=image.trees(image.base("host")), limits=limits or Limits(), network=network)


def left(cache: Path) -> list[str]:
    """Return leftovers of a cache's sandboxes: folders, mounts, control groups, processes."""
    leftovers = [str(path) for path in (cache / "sandbox" / "live").glob("*/rlkit-*")]
    leftovers += [line for line in Path("/proc/mounts").read_text().splitlines() if str(cache) in line]
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    names = {Path(path).name for path in leftovers}
    leftovers += [line for line in listed.splitlines() if any(name in line for name in names)]
    return leftovers
