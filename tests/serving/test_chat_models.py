"""Unmodified clients chat with the base models and the checkpoints of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import rlkit
import rlkit.serving
from rlkit.engine import EngineServer
from rlkit.errors import ServiceError
from rlkit.serving import ChatModels

ASK: list[Any] = [{"role": "user", "content": "begin"}]


@pytest.fixture
def engine(tmp_path: Path, byte_model_dir: Path) -> Iterator[EngineServer]:
    with EngineServer(root=tmp_path / "engine", models=[str(byte_model_dir)], extension=ChatModels) as server:
        yield server


def connect(engine: EngineServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{engine.url}/v1", api_key=engine.api_key, max_retries=0)


def ask(client: openai.OpenAI, model: str) -> str:
    completion = client.chat.completions.create(model=model, messages=ASK, temperature=0, max_tokens=24)
    return completion.choices[0].message.content or ""


def test_a_client_chats_with_a_base_model_and_a_checkpoint(
    engine: EngineServer, byte_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", engine.url)
    monkeypatch.setenv("TINKER_API_KEY", engine.api_key)
    monkeypatch.setenv("RLKIT_RUNS_DIR", str(tmp_path / "runs"))

    async def write_letters(client: Any) -> float:
        completion = await client.chat.completions.create(model="policy", messages=ASK)
        text = completion.choices[0].message.content or ""
        return sum(letter.isalpha() for letter in text) / max(len(text), 1)

    result = rlkit.train(
        envs=[rlkit.CallableEnv(write_letters)],
        model=str(byte_model_dir),
        steps=2,
        batch={"groups": 1, "group_size": 8},
        sampling={"max_tokens": 24},
        optimizer={"learning_rate": 0.05},
        trackers=[],
    )
    assert result.checkpoint is not None
    with connect(engine) as client:
        assert [model.id for model in client.models.list()] == [str(byte_model_dir)]
        base = ask(client, str(byte_model_dir))
        trained = ask(client, result.checkpoint.sampler)
        assert ask(client, str(byte_model_dir)) == base
        assert trained != base
        stream = client.chat.completions.create(
            model=result.checkpoint.sampler, messages=ASK, temperature=0, max_tokens=24, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == trained
        with pytest.raises(openai.NotFoundError):
            ask(client, "nobody/no-such-model")
        assert [model.id for model in client.models.list()] == [str(byte_model_dir), result.checkpoint.sampler]


@pytest.mark.parametrize("model", ["nobody/no-such-model", "tinker://run/sampler_weights/1"])
def test_a_model_that_does_not_exist_is_an_error(engine: EngineServer, model: str) -> None:
    with connect(engine) as client, pytest.raises(openai.NotFoundError, match=model.rpartition("/")[2]):
        ask(client, model)


def test_a_wrong_key_is_an_error(engine: EngineServer, byte_model_dir: Path) -> None:
    with (
        openai.OpenAI(base_url=f"{engine.url}/v1", api_key="tml-other", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        ask(client, str(byte_model_dir))


def test_a_client_of_anthropic_gets_the_same_reply(engine: EngineServer, byte_model_dir: Path) -> None:
    model = str(byte_model_dir)
    body = {"temperature": 0}  # the newest client has no argument for it
    with (
        connect(engine) as client,
        anthropic.Anthropic(base_url=engine.url, api_key=engine.api_key, max_retries=0) as other,
    ):
        assert [listed.id for listed in other.models.list()] == [model]
        message = other.messages.create(model=model, messages=ASK, max_tokens=24, extra_body=body)
        assert "".join(block.text for block in message.content if block.type == "text") == ask(client, model)
        counted = other.messages.count_tokens(model=model, messages=ASK)
        assert counted.input_tokens == message.usage.input_tokens
        with pytest.raises(anthropic.NotFoundError):
            other.messages.count_tokens(model="nobody/no-such-model", messages=ASK)


def test_an_engine_without_the_extension_has_no_chats(tmp_path: Path) -> None:
    with EngineServer(root=tmp_path / "engine") as engine:
        assert httpx.post(f"{engine.url}/v1/chat/completions", json={}).status_code in (401, 404)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_service_that_fails_while_a_model_is_loaded_is_named(
    engine: EngineServer, byte_model_dir: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise ServiceError("the service does not answer")

    monkeypatch.setattr(rlkit.serving, "open_model", fail)
    body = {"model": str(byte_model_dir), "max_tokens": 9, "messages": ASK}
    reply = httpx.post(f"{engine.url}{path}", json=body, headers={"x-api-key": engine.api_key}, timeout=60)
    assert (reply.status_code, reply.json()["error"]["message"]) == (500, "the service does not answer")
