"""Images: a root file system, and the layers that a Dockerfile puts on it.

Invariant: a layer's name is a hash of all that it was made from, so that equal steps on equal ground are taken once; a
layer is there whole or not at all, and one that is built by two at a time is built once.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from rlkit.errors import EnvironmentFault, UsageError
from rlkit.sandbox import context, host, sandbox_folders
from rlkit.sandbox.commands import CommandTimeout
from rlkit.sandbox.dockerfile import Copy, Folder, Recipe, Run
from rlkit.sandbox.namespaces import Sandbox
from rlkit.sandbox.spec import Layers, Limits, Spec
from rlkit.sandbox.threads import in_thread

HOST = "host"
"""The name of the root file system that is made from the host's own."""

_POLL_S = 0.05
_TAIL_CHARACTERS = 800
_KEPT_BYTES = 20 << 30
_YOUNG_S = 3600.0  # longer than from looking for a layer to starting a sandbox with it
_VERSION = 1
_CHOWN_AT_ONCE = 500
_BUILD_S = 3600.0

_rebuilt_layers = set[Path]()
"""The layers that this process was asked to build anew, and has."""


@dataclass(frozen=True)
class Image:
    """The start of a sandbox: overlays of a root file system, names of cached layers from the bottom, and folders."""

    name: str
    trees: tuple[Layers, ...]
    layers: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    user: str | None = None
    folders: tuple[str, ...] = ()


def base(rootfs: str, *, folders: tuple[str, ...] = ()) -> Image:
    """Return the image of a root file system: a folder, or `host`; raise a UsageError where it is none."""
    if rootfs == HOST:
        name, trees = host.trees(folders)
        return Image(name, trees)
    path = Path(rootfs).expanduser().resolve()
    if not (path / "usr").is_dir() and not (path / "bin").is_dir():
        raise UsageError(f"{path} is no root file system: it has neither usr nor bin")
    return Image(f"{path}@{path.stat().st_mtime_ns}", (Layers(target="/", lower=(str(path),)),))


def trees(image: Image) -> tuple[Layers, ...]:
    """Return the overlays of an image, its layers included."""
    overlays: list[Layers] = []
    for number, tree in enumerate(image.trees):
        paths = (f"layers/{name}/{number}" for name in reversed(image.layers))
        above = (path for path in paths if (sandbox_folders.store() / path).is_dir())
        overlays.append(Layers(target=tree.target, lower=(*above, *tree.lower)))
    return tuple(overlays)


async def build(
    recipe: Recipe,
    ground: Image,
    folder: Path,
    *,
    limits: Limits = Limits(),  # noqa: B008  frozen
    rebuild: bool = False,
    timeout_s: float = _BUILD_S,
) -> Image:
    """Take the steps of a Dockerfile that have not been taken yet, each within a time limit.

    RUN has the host's network, as it has in a container engine: it is the task that asks, not a model. With `rebuild`,
    each step is taken anew, once in this process: others may use what it made.

    Raises:
        EnvironmentFault: a RUN failed; with file, line and the end of its output.
    """
    name, layers, folders = ground.name, list(ground.layers), list(ground.folders)
    built = False
    for step in recipe.steps:
        if isinstance(step, Folder):
            folders.append(step.path)
            continue
        found = await in_thread(context.entries, step, folder) if isinstance(step, Copy) else []
        name = _name(name, step, await in_thread(context.digest, found))
        path = sandbox_folders.store() / "layers" / name
        so_far = Image(name, ground.trees, tuple(layers), folders=tuple(folders))
        async with _locked(path):
            if (rebuild and path not in _rebuilt_layers) or not path.is_dir():
                fresh_layer = await _taken(step, found, so_far, limits=limits, timeout_s=timeout_s)
                await in_thread(_settle, fresh_layer, path)
                _rebuilt_layers.update([path] if rebuild else [])
                built = True
            os.utime(path)
        layers.append(name)
    if built:
        await in_thread(prune)
    return Image(
        name, ground.trees, tuple(layers), {**ground.env, **recipe.env}, recipe.workdir, recipe.user, tuple(folders)
    )


def prune(most_bytes: int = _KEPT_BYTES) -> int:
    """Remove the layers that were used longest ago, beyond `most_bytes`, and return their number.

    One that was used within the hour, or that a sandbox is made of, stays.
    """
    used, kept, removed = sandbox_folders.layers_in_use(), 0, 0
    layers = sorted((sandbox_folders.store() / "layers").glob("*/size"), key=_used_s, reverse=True)
    for size in layers:
        path = size.parent
        with suppress(FileNotFoundError):  # another process was first
            kept += int(size.read_text())
            if kept > most_bytes and path.name not in used and time.time() - path.stat().st_mtime > _YOUNG_S:
                sandbox_folders.remove_folder(path.rename(sandbox_folders.fresh()))
                removed += 1
    return removed


def _used_s(size: Path) -> float:
    try:
        return size.parent.stat().st_mtime
    except FileNotFoundError:  # it went meanwhile
        return 0.0


async def _taken(
    step: Run | Copy, found: list[context.Entry], image: Image, *, limits: Limits, timeout_s: float
) -> Path:
    """Take a step in a sandbox of its own, and return the folder with what it wrote."""
    spec = Spec(
        trees=trees(image),
        network=isinstance(step, Run),
        folders=dict.fromkeys(image.folders, 0o755),
        limits=limits,
        uses=image.layers,
    )
    sandbox = await Sandbox.start(spec)
    try:
        if isinstance(step, Run):
            await _run(sandbox, step, timeout_s)
        else:
            await sandbox.put_entries(found)
            await _chown(sandbox, step, found)
    except BaseException:
        await asyncio.shield(sandbox.stop())
        raise
    fresh = await in_thread(sandbox_folders.fresh)
    await sandbox.stop(keep=fresh)
    return fresh


def _settle(fresh: Path, path: Path) -> None:
    total = 0
    for here, _, names in os.walk(fresh):
        total += sum((Path(here) / name).lstat().st_blocks * 512 for name in names)
    (fresh / "size").write_text(str(total))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():  # built anew
        old = path.rename(sandbox_folders.fresh())
        if path.name not in sandbox_folders.layers_in_use():  # or it goes with this process
            sandbox_folders.remove_folder(old)
    fresh.rename(path)


async def _run(sandbox: Sandbox, step: Run, timeout_s: float) -> None:
    try:
        done = await sandbox.run(step.arguments, user=step.user, cwd=step.workdir, env=step.env, timeout_s=timeout_s)
    except CommandTimeout as error:
        raise EnvironmentFault(f"{step.place}: RUN took more than {timeout_s:g} s") from error
    if done.exit_code != 0:
        said = (done.stdout + done.stderr).decode(errors="replace").strip()[-_TAIL_CHARACTERS:]
        raise EnvironmentFault(f"{step.place}: RUN failed with exit code {done.exit_code}: {said}")


async def _chown(sandbox: Sandbox, step: Copy, found: list[context.Entry]) -> None:
    names = [f"/{entry.name}" for entry in found]
    for start in range(0, len(names) if step.owner else 0, _CHOWN_AT_ONCE):
        owner = step.owner or ""
        done = await sandbox.run(["chown", "-h", owner, "--", *names[start : start + _CHOWN_AT_ONCE]])
        if done.exit_code != 0:
            raise UsageError(f"{step.place}: --chown={owner}: {done.stderr.decode(errors='replace').strip()}")


def _name(before: str, step: Run | Copy, copied: str) -> str:
    if isinstance(step, Run):
        what = ["run", step.arguments, sorted(step.env.items()), step.workdir, step.user]
    else:
        what = ["copy", copied, step.owner]
    made = json.dumps([_VERSION, os.geteuid(), before, what])
    return hashlib.sha256(made.encode()).hexdigest()[:16]


@asynccontextmanager
async def _locked(path: Path):
    locks = path.parent.parent / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileIO(locks / path.name, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_POLL_S)
        yield
