"""Plan of a sandbox, sent to its first process, and errors of a failed start.

Invariant: the sandbox can access only the host paths in the plan.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rlkit.errors import EnvironmentFault, MissingError, UsageError
from rlkit.sandbox import cgroups, sandbox_folders
from rlkit.sandbox.spec import MIB, Spec
from rlkit.types import Json

_OVERLAY_FOLDERS = ("upper", "work", "stage")
_OPTIONS_BYTES = 4000  # the kernel reads a page of mount options

_HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t{hostname}\n"
_NAMESPACES_DENIED = (
    "the kernel does not allow the namespaces of a sandbox ({reason}): run as root with CAP_SYS_ADMIN (a container "
    "needs --privileged), allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns=0), or use a container engine or a cloud environment instead"
)


def make_plan(spec: Spec, folder: sandbox_folders.SandboxFolder, groups: cgroups.Groups) -> dict[str, Json]:
    """Make the folders of a sandbox and return its plan; raise a UsageError if its layers cannot be mounted."""
    run_path = folder.path.relative_to(sandbox_folders.store())
    trees: list[Json] = []
    for number, layers in enumerate(spec.trees):
        for name in _OVERLAY_FOLDERS:
            (folder.path / name / str(number)).mkdir(parents=True)
        overlay = {name: f"{run_path}/{name}/{number}" for name in _OVERLAY_FOLDERS}
        trees.append({"target": layers.target, "lower": list(layers.lower), **overlay})
        text = ":".join(layers.lower)
        if any(mark in path for path in layers.lower for mark in ",:\\"):
            raise UsageError(f"the path of an overlay layer contains a comma, colon or backslash: {text}")
        if len(text) > _OPTIONS_BYTES:
            raise UsageError(f"a sandbox has too many layers ({len(layers.lower)}): join RUN instructions with &&")
    texts: dict[str, Json] = {
        "/etc/hosts": _HOSTS.format(hostname=spec.hostname),
        "/etc/hostname": f"{spec.hostname}\n",
    }
    with suppress(OSError):
        texts["/etc/resolv.conf"] = Path("/etc/resolv.conf").read_text() if spec.network else ""
    as_root = os.geteuid() == 0
    return {
        "store": str(sandbox_folders.store()),
        "run_path": str(run_path),
        "hostname": spec.hostname[:63],
        "network": spec.network,
        "user": None if as_root else [os.geteuid(), os.getegid()],
        "trees": trees,
        "binds": [asdict(bind) for bind in spec.binds],
        "cgroups": [str(group / "cgroup.procs") for group in groups.folders],
        "files": texts,
        "folders": {"/tmp": 0o1777, "/var/tmp": 0o1777, "/run": 0o755, "/root": 0o700, **spec.folders},
        "shm_bytes": min(spec.limits.memory_bytes // 2, 1024 * MIB),
    }


def describe_limits(spec: Spec, groups: cgroups.Groups, *, filtered: bool) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the limits of each process, and a description of all limits of the sandbox."""
    limits, as_root = spec.limits, os.geteuid() == 0
    per_process = {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
    }
    descriptions = [f"{limits.cpu_s} processor seconds per process", f"{limits.file_bytes // MIB} MiB per file"]
    if "memory" in groups.enforced:
        descriptions.append(f"{limits.memory_bytes // MIB} MiB of memory")
    else:
        per_process["RLIMIT_DATA"] = limits.memory_bytes
        descriptions.append(f"{limits.memory_bytes // MIB} MiB of memory a process (no control group)")
    if "pids" in groups.enforced:
        descriptions.append(f"{limits.processes} processes")
    elif as_root:
        descriptions.append("any number of processes (no control group)")
    else:
        per_process["RLIMIT_NPROC"] = limits.processes
        descriptions.append(f"{limits.processes} processes (no control group)")
    missing = " (no control group)" if limits.cpus else ""
    descriptions.append(f"{limits.cpus:g} processors" if "cpu" in groups.enforced else f"all processors{missing}")
    descriptions.append("filtered system calls" if filtered else "all system calls (no filter for this processor)")
    return per_process, tuple(descriptions)


def make_start_error(message: dict[str, Json]) -> EnvironmentFault | MissingError:
    """Return the error of a sandbox that did not start."""
    reason = str(message.get("error", "its first process ended"))
    if message.get("errno") in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.ENOSYS):
        return MissingError(_NAMESPACES_DENIED.format(reason=reason))
    if "overlay" in reason:
        return MissingError(
            f"the kernel cannot mount an overlay ({reason}): set RLKIT_CACHE_DIR to a folder on a local disk that "
            "is not itself an overlay"
        )
    return EnvironmentFault(f"a sandbox did not start: {reason}")
