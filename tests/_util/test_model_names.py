from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlkit
from rlkit._util.model_names import hub_id


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def make_folder(folder: Path) -> str:
    folder.mkdir(parents=True)
    return str(folder)


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen3-4B-Instruct-2507", "gpt2"])
def test_a_hub_name_is_unchanged(name: str) -> None:
    assert hub_id(name) == name


def test_cache_folders_have_the_hub_name_of_their_model(cache: Path, tmp_path: Path) -> None:
    assert hub_id(make_folder(cache / "models" / "HuggingFaceTB--SmolLM2-135M-Instruct")) == (
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    snapshot = make_folder(tmp_path / "hf" / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "0123abcd")
    assert hub_id(snapshot) == "Qwen/Qwen3-0.6B"
    (tmp_path / "link").symlink_to(snapshot)
    assert hub_id("link") == "Qwen/Qwen3-0.6B"


def test_a_local_path_has_no_hub_name(cache: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "owner" / "name")
    converted = make_folder(cache / "models" / "owner--model-0123456789abcdef")
    elsewhere = ["/srv/models/llama", "./model", "~/model", "../model", "C:\\models\\llama", "model.gguf", "a/b/c"]
    for path in ["owner/name", str(tmp_path / "owner"), converted, *elsewhere]:
        assert hub_id(path) is None, path


def test_the_default_model_is_defined_once() -> None:
    definition = re.compile(r"^DEFAULT_MODEL\b.*=", re.MULTILINE)
    root = Path(rlkit.__file__).parent
    assert [path.name for path in root.rglob("*.py") if definition.search(path.read_text())] == ["model_names.py"]
