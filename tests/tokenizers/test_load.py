"""A tokenizer is found where it is, or the answer says at once how it can be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.chat.renderers import load_chat
from rlkit.config.loading.load import load_config
from rlkit.errors import MissingError, UsageError
from rlkit.tinker_client.connect import choose_service
from rlkit.tokenizers.bundled import PackagedTokenizer
from rlkit.tokenizers.load import load_tokenizer

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def load(model: str, **named: object) -> object:
    return load_tokenizer(model, with_weights=False, note=lambda message: None, **named)  # type: ignore[arg-type]  as given


@pytest.mark.usefixtures("no_hub")
def test_unavailable_tokenizer_is_one_line_with_four_fixes() -> None:
    with pytest.raises(MissingError) as caught:
        load("someone/some-model")
    message = str(caught.value)
    assert "\n" not in message
    for way in ("someone/some-model", "127.0.0.1", "chat.tokenizer", "tml-renderers", "llama-models", "HF_ENDPOINT"):
        assert way in message


@pytest.mark.usefixtures("no_hub")
def test_packaged_tokenizer_needs_the_hub_only_for_a_template() -> None:
    assert isinstance(load("deepseek-ai/DeepSeek-V3.1"), PackagedTokenizer)
    with pytest.raises(MissingError, match="Four ways"):
        load("deepseek-ai/DeepSeek-V3.1", template=True)


@pytest.mark.usefixtures("no_hub")
def test_configured_tokenizer_is_loaded(byte_model_dir: Path) -> None:
    settings: dict[str, object] = {
        "envs": {"arithmetic": {}},
        "model": "someone/some-model",
        "chat": {"tokenizer": str(byte_model_dir)},
    }
    config = load_config([], settings=settings | {"service": {"base_url": NOWHERE}}).config
    chat = load_chat(config, engine=choose_service(config.service).kind == "engine", note=lambda message: None)
    assert chat.decode(chat.encode("hello")) == "hello"
    assert isinstance(load("someone/some-model", tokenizer="deepseek-ai/DeepSeek-V3.1"), PackagedTokenizer)


@pytest.mark.usefixtures("no_hub")
def test_missing_folder_is_named() -> None:
    with pytest.raises(UsageError, match=r"chat\.tokenizer: there is no folder './nope'"):
        load("someone/some-model", tokenizer="./nope")


@pytest.mark.usefixtures("no_hub")
def test_tokenizer_registered_with_the_cookbook_precedes_the_hub() -> None:
    from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer

    class Registered:
        def encode(self, text: str, **options: bool) -> list[int]:
            return [len(text)]

    register_tokenizer("someone/some-model", Registered)  # type: ignore[arg-type]  all that is needed of one
    try:
        assert isinstance(load("someone/some-model"), Registered)
    finally:
        unregister_tokenizer("someone/some-model")
