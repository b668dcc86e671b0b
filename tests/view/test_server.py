"""The server answers on loopback, with a token, and gives the same as a static export."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl

import httpx
import pytest

from rlkit._util import files
from rlkit.errors import UsageError
from rlkit.metrics.rewards import draw_bars
from rlkit.store.history import table_path
from rlkit.trackers import RunResult
from rlkit.view.html_export import export_html
from rlkit.view.library import Library
from rlkit.view.server import STATIC, ViewServer
from tests.limits import HANG_S
from tests.trackers.folders import write_run, write_step
from tests.view.mixed_run import record_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    record_run(folder / "a b#?%é", steps=1)
    return folder


@contextmanager
def serve(folder: Path) -> Generator[httpx.Client]:
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


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with serve(folder) as client:
        yield client


def test_data_needs_the_token(client: httpx.Client) -> None:
    assert client.get("/api/runs").status_code == 200
    for header in ("", "Bearer", "Bearer wrong", "Bearer é"):
        answer = client.get("/api/runs", headers={"Authorization": header.encode("latin-1")})
        assert (answer.status_code, "token" in answer.text) == (401, True)


def test_other_hosts_and_methods_are_refused(client: httpx.Client) -> None:
    for host in ("example.com", "127.0.0.1.example.com", "example.com:80", ""):
        assert client.get("/api/runs", headers={"Host": host}).status_code == 400
    for method in ("HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
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
    for name in ("..", ".hidden", "%2e%2e%2fother", "%2fetc", "a%00b", "n" * 300, "%20"):
        assert client.get(f"/api/run/{name}").status_code == 404


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, names on the disk are UTF-8")
def test_a_name_that_is_no_utf_8_can_be_opened_and_hides_no_other_run(tmp_path: Path) -> None:
    for name in (b"bad\x80", b"good"):
        write_run(tmp_path / os.fsdecode(name), steps=1)
    assert Library.find([str(tmp_path / os.fsdecode(b"bad\x80"))]).start == "#/run/bad%5Cudc80"
    with serve(tmp_path) as client:
        assert {run["id"] for run in client.get("/api/runs").json()["runs"]} == {"bad\\udc80", "good"}
        assert client.get("/api/run/bad%5Cudc80/metrics").json()["step"] == [0, 1]
        missing = client.get("/api/run/bad%5Cudc80/step/9")
        assert (missing.status_code, missing.json()["error"][-14:]) == (404, " has no step 9")


def test_a_browser_that_leaves_before_the_answer_is_no_error(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(folder) as client:
        head = f"Host: 127.0.0.1\r\nAuthorization: {client.headers['Authorization']}\r\n\r\n"
        for path in ("/", "/main.js", "/api/runs") * 5:
            with socket.create_connection(("127.0.0.1", client.base_url.port)) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\n{head}".encode())
        assert client.get("/api/runs").status_code == 200  # those before it were accepted
    assert not caplog.records


def test_a_port_in_use_is_an_error_of_one_line(client: httpx.Client, folder: Path) -> None:
    with pytest.raises(UsageError, match=r"--port: port \d+ of 127\.0\.0\.1 cannot be used"):
        ViewServer(Library([folder]), port=client.base_url.port or 0)


def test_a_browser_that_ends_late_sees_the_page(folder: Path, tmp_path: Path) -> None:
    script = f"import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout={HANG_S}).status, file=sys.stderr)"
    (tmp_path / "browser.py").write_text(script)
    browser = f"{sys.executable} {tmp_path / 'browser.py'} %s"
    command = [sys.executable, "-m", "rlkit", "view", str(folder)]
    process = subprocess.Popen(command, env={**os.environ, "BROWSER": browser}, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "200\n"
    finally:
        process.kill()
        process.communicate()


def test_an_empty_folder_is_a_list_that_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "named"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    library = Library.find(["empty"])
    assert library.summaries()["runs"] == []
    (tmp_path / "empty" / "begun").mkdir()  # has no run.json yet
    assert Library.find(["empty"]).summaries()["runs"] == []
    write_run(tmp_path / "empty" / "run")
    assert [run["id"] for run in library.summaries()["runs"]] == ["run"]
    write_run(tmp_path / "named" / "empty2")
    (tmp_path / "empty2").mkdir()
    assert list(Library.find(["empty2"]).readers()) == ["empty2"]  # a run of this name comes before an empty folder


def test_a_folder_of_other_files_and_a_missing_run_are_errors(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no run")
    with pytest.raises(UsageError, match="holds no run of rlkit"):
        Library.find([str(tmp_path)])
    for name in (str(tmp_path / "none"), "~no-such-user/run"):
        with pytest.raises(UsageError, match="there is no run"):
            Library.find([name])


@pytest.mark.parametrize("name", ["all.html", "all"])
def test_an_export_holds_what_the_server_gives(folder: Path, tmp_path: Path, name: str) -> None:
    library = Library([folder])
    page = export_html(library, tmp_path / name).read_text()
    assert "src=" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    if name == "all":
        pages = read_folder(tmp_path / "all")
    else:
        store = re.search(r"window\.rlkitData = (.*?)</script>", page)
        assert store is not None
        inline = json.loads(store[1])["inline"].items()
        pages = {path: gzip.decompress(base64.b64decode(data)) for path, data in inline}
    assert "runs" in pages
    assert any("/episode/" in path for path in pages)
    for path, data in pages.items():
        assert data == library.respond(path)
    with pytest.raises(UsageError, match="exists already"):
        export_html(library, tmp_path / name)


def read_folder(folder: Path) -> dict[str, bytes]:
    """Return the data of an export by the path of the API."""
    scripts = [path.read_text() for path in (folder / "data").rglob("*.js")]
    pages = dict(json.loads(f"[{script.removeprefix('rlkitStore(').rstrip()[:-1]}]") for script in scripts)
    return {path: gzip.decompress(base64.b64decode(data)) for path, data in pages.items()}


def write_trial(folder: Path) -> Path:
    """A folder of a trial with long, empty, hidden and unreadable files."""
    (folder / "agent" / ("deep" * 30)).mkdir(parents=True)
    (folder / "result.json").write_text("{}")
    (folder / "agent" / "a b&c=%2F+é?.txt").write_text("text")
    (folder / "agent" / ("deep" * 30) / ("name" * 50)).write_text("deep")
    (folder / "long.txt").write_bytes(b"x" * 1_500_000)
    (folder / "link.txt").symlink_to("/etc/hostname")
    (folder / os.fsdecode(b"odd\xff.txt")).write_text("odd")
    return folder


def test_an_export_holds_the_files_of_trials(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "trials", steps=0)
    write_step(run, 1, info={"trial": str(write_trial(tmp_path / "trial"))})
    library = Library([run])
    pages = read_folder(export_html(library, tmp_path / "out").parent)
    files = {path: data for path, data in pages.items() if "/file?" in path}
    assert len(files) == 3 * 4  # of three episodes
    for path, data in files.items():
        page, _, query = path.partition("?")
        assert data == library.respond(page, dict(parse_qsl(query)))
        assert json.loads(data)["truncated"] == path.endswith("long.txt")
    assert "run/trials/step/1/episode/0/0/0/file?path=agent%2Fa%20b%26c%3D%252F%2B%C3%A9%3F.txt" in files
    page = export_html(library, tmp_path / "all.html").read_text()
    assert all(path in page for path in files)


def test_a_damaged_run_is_named_and_the_others_are_exported(tmp_path: Path) -> None:
    for name in ("bad", "good"):
        write_run(tmp_path / "runs" / name)
    table_path(tmp_path / "runs" / "bad", 2).write_bytes(b"PAR1")
    notes = list[str]()
    pages = read_folder(export_html(Library([tmp_path / "runs"]), tmp_path / "out", note=notes.append).parent)
    assert [note for note in notes if "is damaged" in note and note.startswith("bad ") and "step=000002" in note]
    assert "run/good/step/3/episode/1/0/0" in pages
    assert not any(path.startswith("run/bad/step") for path in pages)
    with pytest.raises(UsageError, match=r"--html: .*step=000002.* is damaged"):
        export_html(Library([tmp_path / "runs" / "bad"]), tmp_path / "bad")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "runs"]


@pytest.mark.parametrize("name", ["all", "all.html"])
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "runs" / "run")
    written, write_bytes = list[Path](), files.write_bytes

    def fill_disk(path: Path, data: bytes) -> None:
        written.append(path)
        if path.suffix == ".html":  # the page is written last
            raise OSError(errno.ENOSPC, "No space left on device")
        write_bytes(path, data)

    monkeypatch.setattr(files, "write_bytes", fill_disk)
    with pytest.raises(UsageError, match=f"cannot write to .*{name}: No space left"):
        export_html(Library([tmp_path / "runs"]), tmp_path / name)
    assert written
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_an_export_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "run")
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    metrics.unlink()
    os.mkfifo(metrics)  # it keeps the export waiting
    command = [sys.executable, "-m", "rlkit", "view", str(tmp_path / "runs"), "--html", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline_s = time.monotonic() + HANG_S
        while not list(tmp_path.glob(".out.*")):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.terminate()
        _, stderr = process.communicate(timeout=HANG_S)
    assert (process.returncode, stderr.splitlines()[-1]) == (130, "interrupted")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_an_export_to_an_impossible_name_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--html: cannot write to .*: File name too long"):
        export_html(Library([tmp_path]), tmp_path / ("n" * 300))


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
    assert re.fullmatch(rf"<RunResult {re.escape(run.name)}: completed: reward \S+ in 1 step ▁>", repr(result))
    assert repr(RunResult("gone", folder / "gone", "completed", 1)) == "<RunResult gone: completed: 1 step>"
    assert re.fullmatch(r"<p>.* reward \S+ in 1 step</p>", result._repr_html_())
    assert RunResult("<b>", folder / "gone", "completed", 1)._repr_html_() == "<p>&lt;b&gt;: completed: 1 step</p>"


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
