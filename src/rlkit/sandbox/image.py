"""Images: a root file system, and the layers of a Dockerfile on it.

Invariant: the name of a layer is a hash of its inputs, so equal steps on equal layers run once, also in concurrent
builds. A layer appears in the cache only when it is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlkit._util.files.lock import LockFile
from rlkit._util.paths import expand_user
from rlkit._util.threads import in_sandbox_thread as in_thread
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.sandbox import context, host, sandbox_folders
from rlkit.sandbox.commands import CommandTimeout
from rlkit.sandbox.dockerfile import Copy, Folder, Recipe, Run
from rlkit.sandbox.namespaces import Sandbox
from rlkit.sandbox.spec import Layers, Limits, Spec

HOST = "host"
"""Name of the root file system made from the host's."""

_POLL_S = 0.05
_TAIL_CHARACTERS = 800
_CACHE_BYTES = 20 << 30
_YOUNG_S = 3600.0  # more than the time between looking up a layer and starting a sandbox with it
_VERSION = 1
_CHOWN_AT_ONCE = 500
_BUILD_S = 3600.0

_rebuilt_layers = set[Path]()  # layers that this process has rebuilt on request


@dataclass(frozen=True)
class Image:
    """An image: overlays of a root file system, names of cached layers (the bottom first), and folders to make."""

    name: str
    trees: tuple[Layers, ...]
    layers: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    user: str | None = None
    folders: tuple[str, ...] = ()


def base(rootfs: str, *, folders: tuple[str, ...] = ()) -> Image:
    """Return the image of a root file system, a folder or `host`; raise a UsageError if a folder is not one."""
    if rootfs == HOST:
        for folder in folders:
            if not Path(folder).is_absolute() or not Path(folder).is_dir():
                raise UsageError(f"host_folders: {folder} is not the absolute path of a folder on this machine")
        name, trees = host.trees(folders)
        return Image(name, trees)
    path = expand_user(rootfs).resolve()
    if not (path / "usr").is_dir() and not (path / "bin").is_dir():
        raise UsageError(f"{path} is not a root file system: it has neither usr nor bin")
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
    base_image: Image,
    folder: Path,
    *,
    limits: Limits = Limits(),  # noqa: B008  frozen
    rebuild: bool = False,
    timeout_s: float = _BUILD_S,
) -> Image:
    """Build an image: run each step of a Dockerfile that is not cached, within a time limit per step.

    RUN has the host's network, as in a container engine, because it is the task's code and not a model's. With
    `rebuild`, each cached step runs again, once per process.

    Raises:
        EnvironmentFault: a RUN failed; the message has file, line and the end of its output.
    """
    image, has_new_layers = base_image, False
    for step in recipe.steps:
        if isinstance(step, Folder):
            image = replace(image, folders=(*image.folders, step.path))
            continue
        entries = await in_thread(context.list_entries, step, folder) if isinstance(step, Copy) else []
        name = _hash_step(image.name, step, await in_thread(context.hash_entries, entries))
        path = sandbox_folders.store() / "layers" / name
        async with _lock(path):
            if (rebuild and path not in _rebuilt_layers) or not path.is_dir():
                layer = await _run_step(step, entries, image, limits=limits, timeout_s=timeout_s)
                await in_thread(_store_layer, layer, path)
                _rebuilt_layers.update([path] if rebuild else [])
                has_new_layers = True
            os.utime(path)
        image = replace(image, name=name, layers=(*image.layers, name))
    if has_new_layers:
        await in_thread(prune)
    return replace(image, env={**image.env, **recipe.env}, workdir=recipe.workdir, user=recipe.user)


def prune(max_bytes: int = _CACHE_BYTES) -> int:
    """Remove the least recently used layers beyond `max_bytes`; return the number of removed layers.

    Layers used within the last hour, or by a sandbox, are kept.
    """
    used, total_bytes, removed = sandbox_folders.list_layers_in_use(), 0, 0
    layers: list[tuple[float, int, Path]] = []
    for size in (sandbox_folders.store() / "layers").glob("*/size"):
        with suppress(FileNotFoundError):  # another process has removed it
            layers.append((size.parent.stat().st_mtime, int(size.read_text()), size.parent))
    for last_use_s, size_bytes, path in sorted(layers, reverse=True):
        total_bytes += size_bytes
        if total_bytes > max_bytes and path.name not in used and time.time() - last_use_s > _YOUNG_S:
            with suppress(FileNotFoundError):
                sandbox_folders.remove_folder(path.rename(sandbox_folders.make_temporary_path()))
                removed += 1
    return removed


async def _run_step(
    step: Run | Copy, entries: list[context.Entry], image: Image, *, limits: Limits, timeout_s: float
) -> Path:
    """Run a step in a new sandbox, and return the folder with the written files."""
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
            await sandbox.put_entries(entries)
            await _chown(sandbox, step, entries)
    except BaseException:
        await asyncio.shield(sandbox.stop())
        raise
    layer = await in_thread(sandbox_folders.make_temporary_path)
    await sandbox.stop(keep=layer)
    return layer


def _store_layer(layer: Path, path: Path) -> None:
    total_bytes = 0
    for folder, _, names in os.walk(layer):
        total_bytes += sum((Path(folder) / name).lstat().st_blocks * 512 for name in names)
    (layer / "size").write_text(str(total_bytes))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():  # a rebuild
        old = path.rename(sandbox_folders.make_temporary_path())
        if path.name not in sandbox_folders.list_layers_in_use():  # otherwise it is removed when this process ends
            sandbox_folders.remove_folder(old)
    layer.rename(path)


async def _run(sandbox: Sandbox, step: Run, timeout_s: float) -> None:
    try:
        completed = await sandbox.run(
            step.arguments, user=step.user, cwd=step.workdir, env=step.env, timeout_s=timeout_s
        )
    except CommandTimeout as error:
        raise EnvironmentFault(f"{step.location}: RUN took more than {timeout_s:g} s") from error
    if completed.exit_code != 0:
        output = (completed.stdout + completed.stderr).decode(errors="replace").strip()[-_TAIL_CHARACTERS:]
        raise EnvironmentFault(f"{step.location}: RUN failed with exit code {completed.exit_code}: {output}")


async def _chown(sandbox: Sandbox, step: Copy, entries: list[context.Entry]) -> None:
    names = [f"/{entry.name}" for entry in entries]
    for start in range(0, len(names) if step.owner else 0, _CHOWN_AT_ONCE):
        owner = step.owner or ""
        done = await sandbox.run(["chown", "-h", owner, "--", *names[start : start + _CHOWN_AT_ONCE]])
        if done.exit_code != 0:
            raise UsageError(f"{step.location}: --chown={owner}: {done.stderr.decode(errors='replace').strip()}")


def _hash_step(previous_name: str, step: Run | Copy, entries_hash: str) -> str:
    if isinstance(step, Run):
        inputs = ["run", step.arguments, sorted(step.env.items()), step.workdir, step.user]
    else:
        inputs = ["copy", entries_hash, step.owner]
    text = json.dumps([_VERSION, os.geteuid(), previous_name, inputs])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@asynccontextmanager
async def _lock(path: Path):
    locks = path.parent.parent / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with LockFile(locks / path.name) as lock:
        while lock.acquire() is not None:  # noqa: ASYNC110  another process may hold it
            await asyncio.sleep(_POLL_S)
        yield
