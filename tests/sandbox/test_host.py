from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlkit.sandbox import host, sandbox_folders


def test_only_world_readable_settings_without_secrets_are_visible(tmp_path: Path) -> None:
    for name, mode in {
        "passwd": 0o644,
        "shadow": 0o644,
        "only-root": 0o600,
        "app/settings": 0o644,
        "app/server.key": 0o644,
        "ssl/private/key.pem": 0o644,
        "ssl/certs/ca.pem": 0o644,
        "locked/settings": 0o644,
        "ssh/config": 0o644,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(mode)
    (tmp_path / "locked").chmod(0o750)
    visible_paths = {
        str(path.relative_to(tmp_path)) for path in host._list_visible(tmp_path, top=True) if path.is_file()
    }
    assert visible_paths == {"passwd", "app/settings", "ssl/certs/ca.pem"}


def test_the_name_of_the_host_root_depends_on_the_visible_files(cache: Path) -> None:
    name, trees = host.trees()
    assert host.trees() == (name, trees)
    assert host.trees(("/srv",))[0] != name
    assert [tree.target for tree in trees][:2] == ["/", "/usr"]
    base = sandbox_folders.store() / trees[0].lower[0]
    assert (base / "etc" / "passwd").exists()
    assert not list((base / "root").iterdir())


def test_concurrent_sandboxes_copy_the_host_settings_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path))
    with ThreadPoolExecutor(4) as threads:
        trees = list(threads.map(lambda number: host.trees(), range(4)))
    assert len({name for name, _ in trees}) == 1
    assert len(list((sandbox_folders.store() / "base").iterdir())) == 1
