"""A tokenizer is found where it is, or the answer says at once how it can be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.chat.bundled_tokenizers import PackagedTokenizer
from rlkit.chat.load import load_chat
from rlkit.chat.tokenizers import load_tokenizer
from rlkit.config import load_config
from rlkit.errors import MissingError, UsageError
from rlkit.service.connect import choose_service

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def found(model: str, **named: object) -> object:
    return load_tokenizer(model, with_weights=False, note=lambda message: None, **named)  # type: ignore[arg-type]  as given


@pytest.mark.usefixtures("no_hub")
def test_where_nothing_serves_one_line_names_all_four_ways() -> None:
    with pytest.raises(MissingError) as caught:
        found("someone/some-model")
    told = str(caught.value)
    assert "\n" not in told
    for way in ("someone/some-model", "127.0.0.1", "chat.tokenizer", "tml-renderers", "llama-models", "HF_ENDPOINT"):
        assert way in told


@pytest.mark.usefixtures("no_hub")
def test_a_packaged_tokenizer_needs_no_hub_unless_a_template_is_wanted() -> None:
    assert isinstance(found("deepseek-ai/DeepSeek-V3.1"), PackagedTokenizer)
    with pytest.raises(MissingError, match="Four ways"):
        found("deepseek-ai/DeepSeek-V3.1", template=True)


@pytest.mark.usefixtures("no_hub")
def test_the_tokenizer_that_the_user_names_is_taken(byte_model_dir: Path) -> None:
    settings: dict[str, object] = {
        "envs": {"arithmetic": {}},
        "model": "someone/some-model",
        "chat": {"tokenizer": str(byte_model_dir)},
    }
    config = load_config([], settings=settings | {"service": {"base_url": NOWHERE}}).config
    chat = load_chat(config, engine=choose_service(config.service).kind == "engine", note=lambda message: None)
    assert chat.decode(chat.encode("hello")) == "hello"
    assert isinstance(found("someone/some-model", tokenizer="deepseek-ai/DeepSeek-V3.1"), PackagedTokenizer)


@pytest.mark.usefixtures("no_hub")
def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"chat\.tokenizer: there is no folder './nope'"):
        found("someone/some-model", tokenizer="./nope")


@pytest.mark.usefixtures("no_hub")
def test_one_that_was_registered_with_the_cookbook_goes_before_the_hub() -> None:
    from tinker_cookbook.tokenizer_utils import register_tokenizer, unregister_tokenizer

    own = object()
    register_tokenizer("someone/some-model", lambda: own)  # type: ignore[arg-type, return-value]  any object will do
    try:
        assert found("someone/some-model") is own
    finally:
        unregister_tokenizer("someone/some-model")
