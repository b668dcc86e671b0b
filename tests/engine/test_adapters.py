"""Several adapters through one server: which weights a sampler has, and that none of them can be ruined."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from rlkit.engine import EngineServer
from rlkit.engine.decode.requests import SampleResult
from rlkit.engine.server import wire_format
from rlkit.engine.server.samplers import Samplers
from rlkit.engine.storage import snapshots

from .conformance import ask, await_answer, open_session
from .helpers import ce_datum, prompt

TEXT = list(b"the cat sat on the mat")


def test_weights_saved_again_under_a_name_replace_the_old_ones(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    logprobs: list[list[float]] = []
    for _ in range(2):
        path = trainer.save_weights_for_sampler("a").result().path
        sampler = client.create_sampling_client(path).result()
        logprobs.append(sampler.compute_logprobs(prompt(*TEXT)).result()[1:])
        rest.delete_checkpoint_from_tinker_path(path).result()
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    assert np.abs(np.array(logprobs[0]) - np.array(logprobs[1])).max() > 0.01


def test_a_sampling_client_ignores_weights_saved_later_under_its_name(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    path = trainer.save_weights_for_sampler("a").result().path
    old = client.create_sampling_client(path).result()
    before = old.compute_logprobs(prompt(*TEXT)).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
    trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    assert trainer.save_weights_for_sampler("a").result().path == path
    with pytest.raises(tinker.NotFoundError, match="others saved under the name"):
        old.compute_logprobs(prompt(*TEXT)).result()
    new = client.create_sampling_client(path).result()
    assert new.compute_logprobs(prompt(*TEXT)).result() != before


@pytest.fixture
def samplers(server: EngineServer) -> Iterator[Samplers]:
    samplers = server._service._runtime._samplers  # pyright: ignore[reportPrivateUsage] what is kept is seen nowhere else
    served_bytes = samplers._served_bytes  # pyright: ignore[reportPrivateUsage] as above
    yield samplers
    samplers._served_bytes = served_bytes  # pyright: ignore[reportPrivateUsage] as above


@pytest.mark.parametrize(("adapters_bytes", "merged"), [(2 << 30, 6), (0, 18)])
def test_merged_adapters_are_kept_within_a_byte_limit(
    client: tinker.ServiceClient,
    samplers: Samplers,
    monkeypatch: pytest.MonkeyPatch,
    adapters_bytes: int,
    merged: int,
) -> None:
    served_counts: list[int] = []
    make = samplers._load  # pyright: ignore[reportPrivateUsage] as above
    monkeypatch.setattr(samplers, "_load", lambda ref: (served_counts.append(len(samplers._served)), make(ref))[1])  # pyright: ignore[reportPrivateUsage] as above
    samplers._served_bytes = adapters_bytes  # pyright: ignore[reportPrivateUsage] as above
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    clients = [trainer.save_weights_and_get_sampling_client().result() for _ in range(6)]
    for turn in range(3):
        params = types.SamplingParams(max_tokens=2, seed=turn, stop=[])
        for sampler in clients:
            sampler.sample(prompt(*TEXT), 1, params).result()
    assert len(served_counts) == merged
    assert adapters_bytes or max(served_counts) < 2


def test_an_unencodable_result_fails_alone(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = wire_format.encode_sample

    def failing(result: SampleResult, request: types.SampleRequest) -> bytes:
        if request.seq_id == 1:
            raise ValueError("on purpose")
        return encode(result, request)

    monkeypatch.setattr(wire_format, "encode_sample", failing)
    session = {"session_id": open_session(server), "sampling_session_seq_id": 0, "base_model": "llama"}
    sampler_id = ask(server, "create_sampling_session", session).json["sampling_session_id"]
    chunks = {"chunks": [{"type": "encoded_text", "tokens": TEXT}]}
    sample_body = {"sampling_session_id": sampler_id, "num_samples": 1, "prompt": chunks}
    pending = [
        ask(
            server,
            "asample",
            sample_body | {"seq_id": seq_id, "sampling_params": {"max_tokens": 40 + seq_id, "stop": []}},
        )
        for seq_id in range(3)
    ]
    answers = [await_answer(server, reply) for reply in pending]
    assert answers[1].json == {"error": "ValueError: on purpose", "category": "server"}
    assert [answer.media_type for answer in answers[::2]] == ["application/x-protobuf"] * 2


def test_many_concurrent_adapters_are_all_answered(client: tinker.ServiceClient, samplers: Samplers) -> None:
    samplers._served_bytes = 0  # pyright: ignore[reportPrivateUsage] as above
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    samplers: list[tinker.SamplingClient] = []
    for _ in range(6):
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
        samplers.append(trainer.save_weights_and_get_sampling_client().result())
    params = types.SamplingParams(max_tokens=20, seed=1, stop=[])
    together = [sampler.sample(prompt(*TEXT), 1, params) for sampler in samplers]
    answers = [future.result().sequences[0].tokens for future in together]
    assert answers == [s.sample(prompt(*TEXT), 1, params).result().sequences[0].tokens for s in samplers]


def test_a_sampler_used_at_every_step_keeps_its_weights(
    server: EngineServer, client: tinker.ServiceClient, samplers: Samplers, monkeypatch: pytest.MonkeyPatch
) -> None:
    samplers._served_bytes = 0  # pyright: ignore[reportPrivateUsage] as above
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    model = server._service._runtime._models[trainer.model_id]  # pyright: ignore[reportPrivateUsage] as above
    size_bytes = 4 * len(model.learner.adapter.flat)
    monkeypatch.setattr(snapshots, "_MEMORY_BYTES_MAX", 1)
    monkeypatch.setattr(snapshots, "_DISK_BYTES_MAX", 3 * size_bytes)
    params = types.SamplingParams(max_tokens=1, seed=0, stop=[])
    reference = trainer.save_weights_and_get_sampling_client().result()
    expected = reference.sample(prompt(*TEXT), 1, params).result().sequences[0].logprobs
    for _ in range(6):  # its merged weights are kept meanwhile
        trainer.save_weights_and_get_sampling_client().result()
        assert reference.sample(prompt(*TEXT), 1, params).result().sequences[0].logprobs == expected
    for _ in range(2):
        client.create_sampling_client(base_model="llama").result().sample(prompt(*TEXT), 1, params).result()
        trainer.save_weights_and_get_sampling_client().result().sample(prompt(*TEXT), 1, params).result()
        assert reference.sample(prompt(*TEXT), 1, params).result().sequences[0].logprobs == expected


def test_settings_that_would_make_weights_non_finite_are_rejected(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    for adam in (types.AdamParams(eps=0.0), types.AdamParams(learning_rate=1e30)):
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match="optim_step"):
            trainer.optim_step(adam).result()
    assert np.isfinite(trainer.forward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"])
