"""Base models: looked up beside everything else, and loaded once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tinker
import torch
from tinker import types

from rlkit.engine import EngineServer
from rlkit.engine.model.weights import Weights
from rlkit.engine.server import base_models
from rlkit.errors import MissingError
from tests.limits import HANG_S, wait_until

from .conformance import ask, await_answer, open_session
from .conftest import connect
from .helpers import ce_datum, prompt

TEXT = [72, 101, 108, 108, 111]
LORA = {"rank": 2, "seed": 0, "train_unembed": True, "train_mlp": True, "train_attn": True}


@dataclass
class Slow:
    """A resolver that takes its time over "slow", which then `exists` or is missing."""

    resolve: Callable[[str], Path]
    names: list[str] = field(default_factory=list[str])
    go_on: threading.Event = field(default_factory=threading.Event)
    exists: bool = True

    def __call__(self, name: str) -> Path:
        self.names.append(name)
        if name != "slow":
            return self.resolve(name)
        assert self.go_on.wait(HANG_S)
        if not self.exists:
            raise MissingError("model 'slow' was not found")
        return self.resolve("llama")


@pytest.fixture
def slow(resolve: Callable[[str], Path]) -> Slow:
    return Slow(resolve)


@pytest.fixture
def server(slow: Slow, tmp_path: Path) -> Iterator[EngineServer]:
    with EngineServer(root=tmp_path, resolve=slow, models=["advertised"], device="cpu") as server:
        yield server
        slow.go_on.set()


def test_a_download_of_a_model_does_not_block_other_requests(server: EngineServer, slow: Slow) -> None:
    session_id = open_session(server)
    model_body = {"session_id": session_id, "model_seq_id": 0, "base_model": "slow", "lora_config": LORA}
    create = ask(server, "create_model", model_body)
    sampling = {"session_id": session_id, "sampling_session_seq_id": 1, "base_model": "slow"}
    sampler_id = ask(server, "create_sampling_session", sampling).json["sampling_session_id"]
    chunks = {"chunks": [{"type": "encoded_text", "tokens": TEXT}]}
    sample_body = {"sampling_session_id": sampler_id, "num_samples": 1, "prompt": chunks}
    sample = ask(server, "asample", sample_body | {"seq_id": 1, "sampling_params": {"max_tokens": 2}})
    with connect(server) as client:
        trainer = client.create_lora_training_client("llama", rank=2, seed=0).result()
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result(HANG_S)
        client.create_sampling_client(base_model="llama").result().compute_logprobs(prompt(*TEXT)).result(HANG_S)
    slow.go_on.set()
    assert await_answer(server, create).json["type"] == "create_model"
    assert b"error" not in await_answer(server, sample).body
    assert slow.names.count("slow") == 1


@pytest.mark.parametrize("exists", [True, False])
def test_requests_waiting_for_a_model_run_in_order_or_fail_with_the_reason(
    server: EngineServer, slow: Slow, exists: bool
) -> None:
    slow.exists = exists
    session_id = open_session(server)
    model_body = {"session_id": session_id, "model_seq_id": 0, "base_model": "slow", "lora_config": LORA}
    ask(server, "create_model", model_body)
    model_id = f"{session_id}:train:0"
    for seq_id in (1, 2):
        ask(server, "optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
    ask(server, "save_weights", {"model_id": model_id, "seq_id": 3, "path": "last"})
    ask(server, f"sessions/{session_id}/finish")  # the save and what it needs are still done, and then nothing is left
    slow.go_on.set()
    store = server._service.store  # pyright: ignore[reportPrivateUsage] nobody can be asked any more
    models = server._service._runtime._models  # pyright: ignore[reportPrivateUsage] as above
    if exists:
        wait_until(store.checkpoints)
        assert [checkpoint.info.steps for checkpoint in store.checkpoints()] == [2]
    session_id = open_session(server)
    model_body["session_id"] = session_id
    reply = await_answer(server, ask(server, "create_model", model_body)).json
    if not exists:
        assert reply == {"error": "model 'slow' was not found", "category": "user"}
        assert store.checkpoints() == []
    assert list(models) == [f"{session_id}:train:0"] * exists


def test_capabilities_list_resolved_models_without_resolving_any(
    server: EngineServer, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contexts() -> dict[str, int | None]:
        models = ask(server, "get_server_capabilities", method="GET").json["supported_models"]
        return {model["model_name"]: model["max_context_length"] for model in models}

    assert contexts() == {"advertised": None}
    assert slow.names == []
    session_id = open_session(server)
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "qwen2"}
    ask(server, "create_sampling_session", sampling)
    assert contexts() == {"advertised": None, "qwen2": 1024}
    monkeypatch.setattr(base_models, "_LOOKUP_WAIT_S", 0.1)
    ask(server, "create_sampling_session", sampling | {"sampling_session_seq_id": 1, "base_model": "slow"})
    assert contexts() == {"advertised": None, "qwen2": 1024}
    assert slow.names == ["qwen2", "slow"]


def test_few_model_names_are_resolved_at_a_time(resolve: Callable[[str], Path]) -> None:
    lock, go_on = threading.Lock(), threading.Event()
    names: list[str] = []
    running = [0, 0]

    def slow(name: str) -> Path:
        with lock:
            names.append(name)
            running[0] += 1
            running[1] = max(running)
        assert go_on.wait(HANG_S)
        with lock:
            running[0] -= 1
        return resolve("llama")

    bases = base_models.BaseModels(slow, torch.device("cpu"))
    looking = [bases.start_lookup(f"hub/{i}") for i in range(50)]
    go_on.set()
    for future in looking:
        assert future is not None
        future.result(HANG_S)
    assert running[1] <= 4
    assert sorted(names) == sorted(f"hub/{i}" for i in range(50))
    again = bases.start_lookup("hub/50")  # those that have looked have ended, and another begins
    assert again is None or again.result(HANG_S) is None


def test_no_name_is_resolved_after_the_models_are_closed() -> None:
    names: list[str] = []
    started, go_on = threading.Semaphore(0), threading.Event()

    def slow(name: str) -> Path:
        names.append(name)
        started.release()
        assert go_on.wait(HANG_S)
        raise MissingError(name)

    bases = base_models.BaseModels(slow, torch.device("cpu"))
    looking = [bases.start_lookup(f"hub/{i}") for i in range(9)]
    for _ in range(4):
        assert started.acquire(timeout=HANG_S)
    bases.close()
    go_on.set()
    for future in looking[:4]:
        assert future is not None
        assert isinstance(future.exception(20), MissingError)
    assert len(names) == 4


def test_a_model_in_use_is_loaded_once(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = base_models.load_weights

    def counted(directory: Path, device: str, *, quantisation: str | None) -> Weights:
        loaded.append(directory.name)
        return load(directory, device, quantisation=quantisation)

    monkeypatch.setattr(base_models, "load_weights", counted)
    names = ["llama", "qwen2", "qwen3"]
    with connect(server) as client:
        trainers = [client.create_lora_training_client(name, rank=2, seed=0).result() for name in names]
        for turn in range(2):
            for name, trainer in zip(names, trainers, strict=True):
                sample(client.create_sampling_client(base_model=name).result())
                sample(trainer.save_weights_and_get_sampling_client().result())
                client.create_training_client_from_state(trainer.save_state(f"turn{turn}").result().path).result()
    assert sorted(loaded) == names


def sample(client: tinker.SamplingClient) -> None:
    client.sample(prompt(*TEXT), 1, types.SamplingParams(max_tokens=2, stop=[])).result()
