"""Root file system of a view of a sandbox.

Invariant: no process of the sandbox can access the root of a view or its private folders. Shared folders are mounted
into the view, so moves, removals and links in the sandbox do not change where a path of the view leads.
"""

from __future__ import annotations

import os
import shutil
import stat
from typing import NamedTuple

from . import job, kernel, root
from .kernel import MS_BIND, MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_REC

_MOST_ENTRIES = 512
"""Maximum number of shared entries of a folder; each is a mount. A sandbox with more must not fail its tests."""
_SYSTEM = frozenset(
    "app bin boot dev etc home lib lib32 lib64 opt proc root run sbin srv sys tmp usr var".split()  # noqa: SIM905
)
_LOGS = "/logs"


class _SharedEntry(NamedTuple):
    """A path that the view shares with the sandbox: a copied mount, the target of a link, or an empty folder."""

    path: str
    tree: int | None = None
    link: str | None = None
    is_folder: bool = True


def build(plan: root.Plan, view: job.View, *, sandbox: int, number: int) -> None:
    """Make this process's root a view of a sandbox, in a mount namespace of its own.

    Args:
        sandbox: a descriptor of the sandbox's mount namespace.
        number: number of the view, unique in this sandbox.
    """
    host_namespace = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    os.setns(sandbox, os.CLONE_NEWNS)
    private = view["private"]
    shared = _list_entries("/", private) if view["shared"] is None else _list_shared(view["shared"], private)
    os.setns(host_namespace, os.CLONE_NEWNS)
    os.close(host_namespace)
    os.unshare(os.CLONE_NEWNS)
    folder = f"{plan['run_path']}/view/{number}"
    if view["shared"] is None:
        _build_shared(plan, folder, shared, private)
    else:
        _build_pristine(plan, folder, shared, private)


def _list_entries(folder: str, private: list[str]) -> list[_SharedEntry]:
    """List the entries of a folder of the sandbox without private ones; at the limit, system folders come first."""
    shared: list[_SharedEntry] = []
    for name in sorted(os.listdir(folder), key=lambda name: (name not in _SYSTEM, name))[:_MOST_ENTRIES]:
        path = os.path.join(folder, name)
        if path in private:
            continue
        if any(place.startswith(f"{path}/") for place in private):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shared += _list_entries(path, private)
        elif (place := _copy_entry(path)) is not None:
            shared.append(place)
    return shared


def _list_shared(paths: list[str], private: list[str]) -> list[_SharedEntry]:
    """List the named folders of the sandbox, and its folders of logs; a missing folder is shown as an empty one."""
    logs = _list_entries(_LOGS, private) if os.path.isdir(_LOGS) and not os.path.islink(_LOGS) else []
    named: list[_SharedEntry] = []
    for path in paths:
        place = _copy_entry(os.path.realpath(path))
        named.append(_SharedEntry(path) if place is None or place.tree is None else place._replace(path=path))
    return logs + named


def _copy_entry(path: str) -> _SharedEntry | None:
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return _SharedEntry(path, link=os.readlink(path))
        if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            tree = kernel.clone_tree(path)
            return _SharedEntry(path, tree=tree, is_folder=stat.S_ISDIR(os.fstat(tree).st_mode))
    except FileNotFoundError:  # removed in the meantime
        return None
    return None


def _build_shared(plan: root.Plan, folder: str, shared: list[_SharedEntry], private: list[str]) -> None:
    """Build a new root on which all entries of the sandbox's root are mounted."""
    kernel.mount("none", "/", "", MS_REC | MS_PRIVATE)
    os.chdir(plan["store"])
    os.makedirs(f"{folder}/root", mode=0o755)
    kernel.mount(f"{folder}/root", f"{folder}/root", "", MS_BIND)
    kernel.restrict_mount(f"{folder}/root", MS_NOSUID | MS_NODEV)
    os.chdir(f"{folder}/root")
    host = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    kernel.pivot_root(".", ".")
    os.fchdir(host)
    _attach(shared, private)
    kernel.unmount(".")
    os.close(host)
    os.chdir("/")


def _build_pristine(plan: root.Plan, folder: str, shared: list[_SharedEntry], private: list[str]) -> None:
    """Build the original image, on which the shared folders are mounted."""
    trees: list[root.Tree] = []
    os.chdir(plan["store"])
    for number, tree in enumerate(plan["trees"]):
        upper, work, stage = (f"{folder}/{name}/{number}" for name in ("upper", "work", "stage"))
        for place in (upper, work, stage):
            os.makedirs(place)
        trees.append({**tree, "upper": upper, "work": work, "stage": stage})
    root.build({**plan, "trees": trees}, lambda: _attach(shared, private))


def _attach(shared: list[_SharedEntry], private: list[str]) -> None:
    # Resolve all paths before anything of the sandbox is mounted, because its folders could have links.
    targets = {place.path: os.path.realpath(place.path) for place in shared}
    for place in shared:
        target = targets[place.path]
        if any(target.startswith(f"{other}/") for other in targets.values()):
            raise OSError(f"{place.path} lies in another folder that the view shares")
        _attach_place(place, target)
    for path in private:
        if os.path.lexists(path):
            _remove(path)
        os.makedirs(path)


def _attach_place(place: _SharedEntry, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if place.link is not None:
        if not os.path.lexists(target):
            os.symlink(place.link, target)
        return
    if os.path.lexists(target) and os.path.isdir(target) != place.is_folder:
        _remove(target)  # the agent has replaced a folder of the image by a file, or a file by a folder
    if place.is_folder:
        os.makedirs(target, exist_ok=True)
    elif not os.path.lexists(target):
        os.close(os.open(target, os.O_CREAT | os.O_RDONLY, 0o644))
    if place.tree is None:
        kernel.mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    else:
        kernel.attach_tree(place.tree, target)
        os.close(place.tree)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
