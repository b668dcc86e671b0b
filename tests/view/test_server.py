"""The server answers on loopback, with a token, and gives the same as a static export."""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rlkit.errors import UsageError
from rlkit.trackers import RunResult
from rlkit.view.api import respond
from rlkit.view.html_export import export_html
from rlkit.view.library import Library
from rlkit.view.notebook import draw_bars
from rlkit.view.server import STATIC, ViewServer
from tests.trackers.folders import write_run
from tests.view.mixed_run import record_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder / "a b#?%é", steps=1)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    server = ViewServer(Library([folder]))
    thread = threading.Thread(target=server.run)
    thread.start()
    base, _, token = server.link.partition("/?token=")
    try:
        with httpx.Client(base_url=base, headers={"Authorization": f"Bearer {token}"}, timeout=60) as client:
            yield client
    finally:
        server.stop()
        thread.join()


def test_data_needs_the_token(client: httpx.Client) -> None:
    assert client.get("/api/runs").status_code == 200
    for header in ("", "Bearer", "Bearer wrong", "Bearer é"):
        answer = client.get("/api/runs", headers={"Authorization": header.encode("latin-1")})
        assert (answer.status_code, "token" in answer.text) == (401, True)


def test_other_hosts_and_methods_are_refused(client: httpx.Client) -> None:
    for host in ("example.com", "127.0.0.1.example.com", "example.com:80", ""):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 400
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/runs").status_code == 405


def test_static_files_are_those_of_the_package_only(client: httpx.Client) -> None:
    page = client.get("/", headers={"Authorization": ""})
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in page.headers["content-security-policy"]
    for script in re.findall(r'"\./([^"]+)"', page.text):
        answer = client.get(f"/{script}")
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, "text/javascript")
    for path in ("/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "//etc/passwd", "/pages", "/none.js"):
        assert client.get(path).status_code == 404


def test_the_frame_of_an_environments_picture_has_no_origin_and_no_network(client: httpx.Client) -> None:
    policy = client.get("/frame.html").headers["content-security-policy"]
    assert policy.startswith("sandbox allow-scripts; default-src 'none'; ")
    assert "allow-same-origin" not in policy
    assert policy.endswith("frame-ancestors 'self'")


def test_an_unchanged_page_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/api/runs")
    again = client.get("/api/runs", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_a_name_with_special_characters_is_one_part_of_the_path(client: httpx.Client) -> None:
    answer = client.get("/api/run/a%20b%23%3F%25%C3%A9/step/1")
    assert answer.status_code == 200
    assert answer.json()["step"] == 1
    missing = client.get("/api/run/none/step/1")
    assert (missing.status_code, missing.json()["error"]) == (404, "there is no run 'none'")


def test_a_port_in_use_is_an_error_of_one_line(client: httpx.Client, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--port: port \d+ of 127\.0\.0\.1 cannot be used"):
        ViewServer(Library([folder]), port=client.base_url.port or 0)


@pytest.mark.parametrize("name", ["all.html", "all"])
def test_an_export_holds_what_the_server_gives(folder: Path, tmp_path: Path, name: str) -> None:
    library = Library([folder])
    page = export_html(library, tmp_path / name).read_text()
    assert "src=" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    if name == "all":
        scripts = [path.read_text() for path in (tmp_path / "all" / "data").iterdir()]
        pages = dict(json.loads(f"[{script.removeprefix('rlkitStore(').rstrip()[:-1]}]") for script in scripts)
    else:
        store = re.search(r"window\.rlkitData = (.*?)</script>", page)
        assert store is not None
        pages = json.loads(store[1])["inline"]
    assert "runs" in pages
    assert any("/episode/" in path for path in pages)
    for path, data in pages.items():
        assert gzip.decompress(base64.b64decode(data)) == respond(library, path)
    with pytest.raises(UsageError, match="exists already"):
        export_html(library, tmp_path / name)


def test_pages_of_an_export_have_the_names_that_the_script_asks_for(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "sweep (2)!~*'", steps=1)
    export_html(Library([tmp_path / "runs"]), tmp_path / "out")
    # `encodeURIComponent` leaves these characters as they are.
    names = {path.name for path in (tmp_path / "out" / "data").iterdir()}
    assert "run.2fsweep.2520.282.29.21.7e.2a.27.js" in names


def test_an_export_loads_nothing_from_elsewhere(folder: Path, tmp_path: Path) -> None:
    page = export_html(Library([folder]), tmp_path / "all.html").read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', page)
    assert policy is not None
    assert page.index(policy[0]) < page.index("<script")
    assert "default-src 'none'" in policy[1]
    assert not re.search(r"https?:|connect-src|frame-src", policy[1])


def test_the_package_stays_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) <= 400_000


def test_a_result_is_a_line_with_a_chart(folder: Path) -> None:
    (run,) = folder.iterdir()
    result = RunResult(run.name, run, "completed", 1)
    assert re.fullmatch(
        rf"<RunResult {re.escape(run.name)}: completed after 1 steps, reward \S+ → \S+ ▁>", repr(result)
    )
    assert repr(RunResult("gone", folder / "gone", "completed", 1)) == "<RunResult gone: completed after 1 steps>"
    assert "<svg" not in RunResult("<b>", folder / "gone", "completed", 1)._repr_html_()
    assert "&lt;b&gt;" in RunResult("<b>", folder / "gone", "completed", 1)._repr_html_()


def test_the_bars_of_a_long_run_are_means_of_its_steps() -> None:
    assert draw_bars([0.0, 1.0]) == "▁█"
    assert draw_bars([0.5] * 3) == "▁▁▁"
    assert len(draw_bars(list(map(float, range(1000))))) == 24
    assert draw_bars([]) == ""


def test_a_result_shows_its_page(folder: Path) -> None:
    (run,) = folder.iterdir()
    view = RunResult(run.name, run, "completed", 1).view()
    base, _, rest = view.link.partition("/?token=")
    answer = httpx.get(f"{base}/api/runs", headers={"Authorization": f"Bearer {rest.partition('#')[0]}"}, timeout=60)
    assert answer.json()["runs"][0]["id"] == run.name
    assert f'href="{view.link}"' in view._repr_html_()
    assert "frame-ancestors http://localhost:*" in httpx.get(base).headers["content-security-policy"]
