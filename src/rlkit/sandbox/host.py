"""Root file system made from the host's.

Invariant: only listed parts of the host are visible: programs and libraries, world-readable settings without secrets,
and the data of package managers. Homes, credentials and data are not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
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
"""Hidden entries of /etc. Some are world-readable, but they describe this machine and its accounts, not its
programs."""

_SECRET = (".key", ".pem.key", ".p12", ".pfx", ".keytab", ".kdbx", ".gpg-secret", "credentials", ".netrc", ".pgpass")


def trees(folders: tuple[str, ...] = ()) -> tuple[str, tuple[Layers, ...]]:
    """Return a name for the visible part of the host, and its overlays, including `folders`.

    The name changes with the settings in /etc and with the list of folders.
    """
    name, base = _make_base(sandbox_folders.store())
    system = [f"/{entry}" for entry in _SYSTEM if (path := Path("/") / entry).is_dir() and not path.is_symlink()]
    packages = [path for path in _PACKAGES if Path(path).is_dir()]
    paths = [*system, *packages, *folders]
    digest = hashlib.sha256("\0".join([name, *paths]).encode()).hexdigest()[:16]
    overlays = tuple(Layers(target=path, lower=(path,)) for path in paths)
    return digest, (Layers(target="/", lower=(str(base.relative_to(sandbox_folders.store())),)), *overlays)


@cache
def _make_base(store: Path) -> tuple[str, Path]:
    """Return the name and path of the folder with settings and empty folders; make it unless it exists."""
    visible = sorted(_list_visible(Path("/etc"), top=True))
    digest = hashlib.sha256()
    for path in visible:
        status = path.lstat()
        digest.update(f"{path}\0{status.st_mode}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    name = f"host-{digest.hexdigest()[:16]}"
    base = store / "base" / name
    if not base.is_dir():
        _fill_base(base, visible)
    return name, base


def _list_visible(folder: Path, *, top: bool = False) -> list[Path]:
    """List the world-readable entries of a folder whose names do not suggest a secret."""
    visible: list[Path] = []
    with suppress(OSError):
        for entry in os.scandir(folder):
            mode = entry.stat(follow_symlinks=False).st_mode
            if (top and entry.name in _HIDDEN) or entry.name.endswith(_SECRET) or entry.name == "private":
                continue
            path = Path(entry.path)
            if stat.S_ISLNK(mode) or (stat.S_ISREG(mode) and mode & stat.S_IROTH):
                visible.append(path)
            elif stat.S_ISDIR(mode) and mode & stat.S_IROTH and mode & stat.S_IXOTH:
                visible += [path, *_list_visible(path)]
    return visible


def _fill_base(base: Path, visible: list[Path]) -> None:
    temporary = sandbox_folders.make_temporary_path()
    base.parent.mkdir(parents=True, exist_ok=True)
    for name, mode in _FOLDERS.items():
        (temporary / name).mkdir(parents=True)
        (temporary / name).chmod(mode)
    for name in _SYSTEM:
        if (Path("/") / name).is_symlink():
            (temporary / name).symlink_to((Path("/") / name).readlink())
    (temporary / "var/run").symlink_to("/run")
    for path in visible:
        target = temporary / path.relative_to("/")
        with suppress(FileNotFoundError, PermissionError):  # removed in the meantime, or not readable by this user
            if path.is_dir() and not path.is_symlink():
                target.mkdir(exist_ok=True)
            else:
                shutil.copy2(path, target, follow_symlinks=False)
    try:
        temporary.rename(base)
    except OSError:  # another process or thread has made it
        sandbox_folders.remove_folder(temporary)
