"""A root file system out of the host's own.

Invariant: what is seen of the host is a list, not what is left of it: its programs and libraries, those of its settings
that every user may read and that hold no secret, and what package managers know. No home, no credential, no data.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from rlkit.sandbox import sandbox_folders
from rlkit.sandbox.spec import Layers

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PACKAGES = ("/var/lib/dpkg", "/var/lib/apt", "/var/lib/rpm", "/var/lib/pacman", "/lib/apk")
_FOLDERS = {
    "dev": 0o755, "etc": 0o755, "home": 0o755, "media": 0o755, "mnt": 0o755, "opt": 0o755, "proc": 0o555,
    "root": 0o700, "run": 0o755, "srv": 0o755, "sys": 0o555, "tmp": 0o1777, "var": 0o755, "var/cache": 0o755,
    "var/lib": 0o755, "var/local": 0o755, "var/log": 0o755, "var/mail": 0o755, "var/opt": 0o755, "var/spool": 0o755,
    "var/tmp": 0o1777,
}  # fmt: skip

# fmt: off
_HIDDEN = frozenset({
    "NetworkManager", "aws", "boto.cfg", "cloud", "containerd", "credstore", "credstore.encrypted", "crypttab",
    "cups", "docker", "docker-registry", "environment", "environment.d", "exports", "fstab", "gcloud", "google",
    "gshadow", "gshadow-", "hostid", "hostname", "hosts", "ipsec.d", "ipsec.secrets", "kerberos", "krb5.keytab",
    "kubernetes", "letsencrypt", "machine-id", "mtab", "mysql", "netrc", "openvpn", "polkit-1", "postgresql",
    "ppp", "rancher", "resolv.conf", "samba", "secrets", "security", "shadow", "shadow-", "ssh", "ssmtp",
    "sudoers", "sudoers.d", "vault", "wireguard", "wpa_supplicant",
})
# fmt: on
"""Names directly in /etc that are not shown though every user may read some of them: they are about this machine and
its accounts, not about its programs."""

_SECRET = (".key", ".pem.key", ".p12", ".pfx", ".keytab", ".kdbx", ".gpg-secret", "credentials", ".netrc", ".pgpass")


def trees(folders: tuple[str, ...] = ()) -> tuple[str, tuple[Layers, ...]]:
    """A name for what is seen of the host, and the overlays that show it; `folders` are shown besides.

    The name changes when the settings in /etc do, or which folders there are.
    """
    name, base = _base(sandbox_folders.store())
    system = [f"/{entry}" for entry in _SYSTEM if (path := Path("/") / entry).is_dir() and not path.is_symlink()]
    packages = [path for path in _PACKAGES if Path(path).is_dir()]
    shown = [*system, *packages, *folders]
    whole = hashlib.sha256("\0".join([name, *shown]).encode()).hexdigest()[:16]
    own = tuple(Layers(target=path, lower=(path,)) for path in shown)
    return whole, (Layers(target="/", lower=(str(base.relative_to(sandbox_folders.store())),)), *own)


_making = threading.Lock()


def _forked() -> None:
    global _making  # noqa: PLW0603  there is one
    _making = threading.Lock()  # a thread that the child does not have may hold the old one


os.register_at_fork(after_in_child=_forked)


@cache
def _base(store: Path) -> tuple[str, Path]:
    """The folder with the settings and the empty folders, made unless it is there."""
    shown = sorted(_shown(Path("/etc"), top=True))
    whole = hashlib.sha256()
    for path in shown:
        about = path.lstat()
        whole.update(f"{path}\0{about.st_mode}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    name = f"host-{whole.hexdigest()[:16]}"
    base = store / "base" / name
    with _making:  # threads that make it at once would take each other's for their own
        if not base.is_dir():
            _make(base, shown)
    return name, base


def _shown(folder: Path, *, top: bool = False) -> list[Path]:
    """What of a folder every user may read, and is no secret by its name."""
    found: list[Path] = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            mode = entry.stat(follow_symlinks=False).st_mode
            if (top and entry.name in _HIDDEN) or entry.name.endswith(_SECRET) or entry.name == "private":
                continue
            path = Path(entry.path)
            if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and mode & stat.S_IROTH):
                found.append(path)
            elif stat.S_ISDIR(mode) and mode & stat.S_IROTH and mode & stat.S_IXOTH:
                found += [path, *_shown(path)]
    return found


def _make(base: Path, shown: list[Path]) -> None:
    fresh = sandbox_folders.fresh()
    base.parent.mkdir(parents=True, exist_ok=True)
    for name, mode in _FOLDERS.items():
        (fresh / name).mkdir(parents=True)
        (fresh / name).chmod(mode)
    for name in _SYSTEM:
        if (Path("/") / name).is_symlink():
            (fresh / name).symlink_to((Path("/") / name).readlink())
    (fresh / "var/run").symlink_to("/run")
    for path in shown:
        target = fresh / path.relative_to("/")
        with suppress(FileNotFoundError, PermissionError):  # it went meanwhile, or is not for this user
            if path.is_dir() and not path.is_symlink():
                target.mkdir(exist_ok=True)
            else:
                shutil.copy2(path, target, follow_symlinks=False)
    try:
        fresh.rename(base)
    except OSError:  # another process was first
        sandbox_folders.remove_folder(fresh)
