from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlkit.envs.harbor.registries.registry import fetch, parse_dataset
from rlkit.envs.harbor.registries.registry_files import read_rows
from rlkit.envs.harbor.tasks import Selection
from rlkit.errors import MissingError, RlkitError, UsageError

from .conftest import write_task
from .terminal_bench.conftest import git

RECORDED = Path(__file__).parents[2] / "data" / "registries"


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    tasks = [{"name": path.name, "path": str(path)} for path in (write_task(tmp_path / f"task-{n}") for n in range(3))]
    datasets = [{"name": "tiny", "version": "0.1", "description": "", "tasks": tasks, "metrics": []}]
    path = tmp_path / "registry.json"
    path.write_text(json.dumps(datasets))
    return path


@pytest.mark.parametrize("dataset", ["tiny@0.1", "tiny==0.1", "tiny"])
def test_the_tasks_of_a_dataset_are_chosen_by_name(registry: Path, dataset: str) -> None:
    tasks = fetch(dataset, Selection(task_ids=["task-[12]"], shuffle=False), registry=str(registry))
    assert tasks == {f"task-{number}": registry.parent / f"task-{number}" for number in (1, 2)}


def test_a_missing_dataset_is_a_one_line_error(registry: Path) -> None:
    with pytest.raises(
        MissingError,
        match=r"^dataset: tiny@0\.2 cannot be fetched from .*registry\.json .*set tasks_dir",
    ):
        fetch("tiny@0.2", Selection(), registry=str(registry))


def test_two_tasks_of_the_same_name_are_both_kept(registry: Path) -> None:
    (dataset,) = json.loads(registry.read_text())
    other = write_task(registry.parent / "other" / "task-1")
    dataset["tasks"].append({"name": "task-1", "path": str(other)})
    registry.write_text(json.dumps([dataset]))
    with pytest.raises(MissingError, match=r"^dataset: tiny has 2 tasks named 'task-1': set tasks_dir"):
        fetch("tiny", Selection(), registry=str(registry))


class Registries(BaseHTTPRequestHandler):
    """Stand-in for the servers of registries: a file, and Harbor's service, which its client asks by a call."""

    answers: ClassVar[list[tuple[int, object]]] = []
    requests: ClassVar[list[tuple[str, object]]] = []

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: object) -> None:
        self.requests.append((self.path, body))
        status, content = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    Registries.answers[:], Registries.requests[:] = [], []
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Registries)
    threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_port}"
    listening.shutdown()
    listening.server_close()


def test_a_registry_is_read_from_its_url_and_kept(server: str, registry: Path) -> None:
    waited, notes = list[float](), list[str]()
    url, rows = f"{server}/registry.json", json.loads(registry.read_text())
    Registries.answers[:] = [(503, "busy"), (200, rows)]
    assert read_rows(url, note=notes.append, sleep=waited.append) == rows
    assert waited == [1.0]
    assert notes == [f"registry: {url} cannot be read (HTTP status 503); retrying in 1 s"]
    Registries.answers[:] = [(404, "gone")]
    assert read_rows(url, note=notes.append, sleep=waited.append) == rows
    assert notes[1:] == [f"registry: {url} cannot be read (HTTP status 404): using this machine's last copy"]
    Registries.answers[:] = [(200, rows)]
    assert list(fetch("tiny", Selection(task_ids=["task-1"]), registry=url)) == ["task-1"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>Log in</html>", "the answer is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[" * 100_000, "the answer is not JSON: maximum recursion depth exceeded"),
        ({"error": "log in"}, "the answer must be a list of datasets, not of type dict"),
        (["log in"], "the answer must be a list of datasets, but row 0 has no name"),
        ([{"message": "log in"}], "the answer must be a list of datasets, but row 0 has no name"),
    ],
)
def test_an_invalid_response_does_not_replace_the_cached_registry(
    server: str, registry: Path, body: object, reason: str
) -> None:
    notes, waited = list[str](), list[float]()
    url, rows = f"{server}/registry.json", json.loads(registry.read_text())
    Registries.answers[:] = [(200, body)]
    with pytest.raises(MissingError, match=rf"^registry: {url} cannot be read \({re.escape(reason)}.*\): check"):
        read_rows(url, note=notes.append, sleep=waited.append)
    Registries.answers[:] = [(200, rows)]
    assert read_rows(url, note=notes.append, sleep=waited.append) == rows
    Registries.answers[:] = [(200, body)]
    for _ in range(2):
        assert read_rows(url, note=notes.append, sleep=waited.append) == rows
    assert [note.startswith(f"registry: {url} cannot be read ({reason}") for note in notes] == [True, True]
    assert all(note.endswith(": using this machine's last copy") for note in notes)
    assert waited == []


@pytest.mark.parametrize(
    "secret_url",
    [
        "http://me:s3cret@HOST/r.json",
        "http://s3cret@HOST/r.json",
        "http://me:s3@cret@HOST/r.json",
        "http://HOST/r.json?token=s3cret",
        "http://me:s3cret@HOST/r.json?token=s3cret#s3cret",
    ],
)
def test_credentials_of_a_registry_are_in_the_request_and_in_no_message(
    server: str, registry: Path, secret_url: str
) -> None:
    host = server.removeprefix("http://")
    url, notes = secret_url.replace("HOST", host), list[str]()
    with pytest.raises(MissingError, match=rf"registry: {server}/r\.json cannot be read \(HTTP status 500\)") as raised:
        Registries.answers[:] = [(500, "s3cret is wrong")]
        read_rows(url, note=notes.append, sleep=lambda seconds: None)
    messages = [str(raised.value), *notes]
    assert notes[0] == f"registry: {server}/r.json cannot be read (HTTP status 500); retrying in 1 s"
    assert ("s3cret" in Registries.requests[0][0]) == ("?" in url)
    (core,) = json.loads((RECORDED / "terminal_bench_1.json").read_text())["rows"]
    faults = [
        ("tiny@0.2", json.loads(registry.read_text())),
        ("other", [core]),
        ("terminal-bench-core@9", [core]),
        ("terminal-bench-core", [core | {"branch": "-q"}]),
    ]
    for dataset, rows in faults:
        Registries.answers[:] = [(200, rows)]
        with pytest.raises(RlkitError, match=f"{server}/r.json") as fault:
            fetch(dataset, Selection(), registry=url, note=notes.append)
        messages.append(str(fault.value))
    Registries.answers[:] = [(404, "gone")]
    read_rows(url, note=notes.append, sleep=lambda seconds: None)
    assert not re.search("s3|cret", "".join([*messages, *notes]))


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3/cret@localhost/r.json",
        "http://me:s3?cret@localhost/r.json",
        "http://me:s3#cret@localhost/r.json",
        "http://[s3cret/r.json",
    ],
)
def test_a_malformed_registry_url_is_reported_without_its_credentials(url: str) -> None:
    notes = list[str]()
    with pytest.raises(UsageError, match=r"^registry: .* is malformed: ") as raised:
        read_rows(url, note=notes.append, sleep=lambda seconds: None)
    assert not re.search("s3|cret", "".join([str(raised.value), *notes]))


@pytest.mark.parametrize("url", ["ftp://me:s3cret@localhost/r.json", "file:///r.json", "s3cret://x", "://x"])
def test_a_registry_url_of_another_scheme_is_rejected(url: str) -> None:
    notes = list[str]()
    with pytest.raises(UsageError, match=r"^registry: .*: give a URL of the scheme http or https, or the path of a"):
        fetch("tiny", Selection(), registry=url, note=notes.append)
    assert notes == []


def test_an_unreachable_registry_is_a_one_line_error(server: str) -> None:
    waited, notes = list[float](), list[str]()
    with pytest.raises(
        MissingError, match=r"^registry: http://127\.0\.0\.1:9/r\.json cannot be read .* to a local file$"
    ):
        read_rows("http://127.0.0.1:9/r.json", note=notes.append, sleep=waited.append)
    assert (waited, len(notes)) == ([1.0, 3.0], 2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("[{", "is not JSON: "),
        ('{"datasets": []}', "must be a list of datasets, not of type dict"),
        (b"\xff", "cannot be read: not a text file"),
    ],
)
def test_an_invalid_registry_file_is_an_error(tmp_path: Path, text: str | bytes | None, reason: str) -> None:
    path = tmp_path / "registry.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError, match=rf"^registry: {path} {reason}"):
        fetch("tiny", Selection(), registry=str(path))


def test_a_registry_may_mix_entries_of_both_forms(registry: Path) -> None:
    rows = json.loads(registry.read_text())
    (core,) = json.loads((RECORDED / "terminal_bench_1.json").read_text())["rows"]
    registry.write_text(json.dumps([core, *rows]))
    assert len(fetch("tiny", Selection(), registry=str(registry))) == 3
    with pytest.raises(UsageError, match=r"has no version '9' of terminal-bench-core; it has 0\.1\.1"):
        fetch("terminal-bench-core@9", Selection(), registry=str(registry))


@pytest.fixture
def harbors_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A git repository with the tasks of Harbor's recorded entry, and its commit."""
    repository = tmp_path / "upstream"
    (dataset,) = json.loads((RECORDED / "harbor.json").read_text())["rows"]
    for task in dataset["tasks"]:
        write_task(repository / task["path"])
    git(tmp_path, "init", "--quiet", str(repository))
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "tasks")
    for module in ("harbor.tasks.client", "harbor.models.task.id"):
        monkeypatch.setattr(f"{module}.TASK_CACHE_DIR", tmp_path / "tasks")
    return repository, git(repository, "rev-parse", "HEAD")


def recorded_dataset(repository: Path, commit: str) -> dict[str, Any]:
    """The recorded entry of Harbor's registry, with the place of its repository and nothing else changed."""
    (dataset,) = json.loads((RECORDED / "harbor.json").read_text())["rows"]
    tasks = [task | {"git_url": repository.as_uri(), "git_commit_id": commit} for task in dataset["tasks"]]
    return dataset | {"tasks": tasks}


@pytest.mark.filterwarnings("ignore:The .* parameter is deprecated:DeprecationWarning")  # by Harbor's client's library
def test_a_dataset_of_harbors_registry_is_fetched_by_harbors_client(
    server: str, harbors_tasks: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harbor.registry.client.harbor.harbor.HARBOR_SUPABASE_URL", server)
    Registries.answers[:] = [(200, recorded_dataset(*harbors_tasks))]
    tasks = fetch("terminal-bench-pro==1.0", Selection(task_ids=["*sudoku"]), registry=None)
    assert list(tasks) == ["validate-and-solve-sudoku"]
    assert (tasks["validate-and-solve-sudoku"] / "instruction.md").read_text() == "Greet."
    assert Registries.requests == [
        ("/rest/v1/rpc/get_dataset", {"p_name": "terminal-bench-pro", "p_version": "1.0"}),
    ]


def test_a_file_in_harbors_format_is_read_by_harbors_client(harbors_tasks: tuple[Path, str], tmp_path: Path) -> None:
    path = tmp_path / "registry.json"
    path.write_text(json.dumps([recorded_dataset(*harbors_tasks)]))
    tasks = fetch("terminal-bench-pro", Selection(shuffle=False), registry=str(path))
    assert list(tasks) == ["validate-and-solve-sudoku", "xrd-two-peak-fitting"]
    assert all((folder / "task.toml").is_file() for folder in tasks.values())


def test_names_of_terminal_bench_1_are_looked_up_in_its_published_registry(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.envs.harbor.registries.registry.REGISTRY_URL", f"{server}/terminal-bench.json")
    Registries.answers[:] = [(200, json.loads((RECORDED / "terminal_bench_1.json").read_text())["rows"])]
    with pytest.raises(UsageError, match=r"terminal-bench\.json has no version '0\.1\.0' of terminal-bench-core"):
        fetch("terminal-bench-core==0.1.0", Selection(), registry=None)
    assert Registries.requests == [("/terminal-bench.json", None)]


def test_a_dataset_has_a_name_and_an_optional_version() -> None:
    assert (
        parse_dataset("terminal-bench-core==0.1.1")
        == parse_dataset("terminal-bench-core@0.1.1")
        == ("terminal-bench-core", "0.1.1")
    )
    assert parse_dataset("org/name") == ("org/name", None)
    for wrong in ("@1", "a@b@c"):
        with pytest.raises(UsageError, match="not of the form name@version"):
            parse_dataset(wrong)
