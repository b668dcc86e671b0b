"""Sessions, models, samplers, answers and checkpoints of the Tinker protocol, driven by the real SDK; where the SDK
hides what is answered, by hand.

The cases about training are in `test_conformance_training.py`, those about numbers in `test_conformance_numbers.py`.
`conformance.py` lists what must be covered.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import tinker
from tinker import types

from rlkit.engine import EngineServer
from rlkit.engine.server import routes

from . import test_conformance_numbers, test_conformance_training
from .conformance import (
    ADAM,
    POINTS,
    ROUTES,
    SESSION,
    TEXT,
    ask,
    await_answer,
    covered_points,
    covered_routes,
    covers,
    loss,
    new_trainer,
    open_model,
    open_session,
    step,
    train_request,
)
from .conftest import connect
from .helpers import ce_datum, prompt


@covers(points=(1,))
def test_the_server_accepts_only_its_key(server: EngineServer) -> None:
    with (
        pytest.raises(tinker.AuthenticationError),
        tinker.ServiceClient(base_url=server.url, api_key="tml-other") as stranger,
    ):
        stranger.create_sampling_client(base_model="llama").result()
    assert ask(server, "create_session", SESSION, key="tml-other").status == 401


@covers(routes=(1,), points=(2,))
def test_client_config_disables_optional_routes(client: tinker.ServiceClient) -> None:
    flags = client.holder.get_client_config()
    assert not flags.pjwt_auth_enabled
    assert not flags.custom_loss_server_side
    assert not flags.sample_use_retrieve_futures
    assert not flags.sample_join_sampling_session


@covers(routes=(2,))
def test_the_sdk_can_parse_the_dynamic_config(server: EngineServer) -> None:
    reply = ask(server, "client/dynamic_config", {"sdk_version": "0.38.0"})
    assert reply.status == 404 or types.ClientDynamicConfigResponse.model_validate(reply.json)


@covers(routes=(3,), points=(3,))
def test_every_session_id_is_unguessable(server: EngineServer) -> None:
    ids = {open_session(server) for _ in range(16)}
    assert len(ids) == 16
    assert min(map(len, ids)) >= 16


@covers(routes=(4,), points=(3,))
def test_a_heartbeat_is_answered_while_the_session_is_open_and_is_410_afterwards(server: EngineServer) -> None:
    session_id = open_session(server)
    assert ask(server, "session_heartbeat", {"session_id": session_id}).status == 200
    ask(server, f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    assert ask(server, "session_heartbeat", {"session_id": session_id}).status == 410


@covers(routes=(5,))
def test_telemetry_is_accepted(server: EngineServer) -> None:
    assert ask(server, "telemetry", {"events": [], "session_id": "x"}).json == {"status": "accepted"}


@covers(routes=(6,), points=(3,))
@pytest.mark.parametrize("status", ["success", "errored", "interrupted"])
def test_finishing_a_session_is_204_and_ends_its_models(server: EngineServer, status: str) -> None:
    session_id = open_session(server)
    model_id = open_model(server, session_id)
    assert ask(server, "get_info", {"model_id": model_id}).status == 200
    reply = ask(server, f"sessions/{session_id}/finish", {"reason": {"type": status}, "detail": None})
    assert (reply.status, reply.body) == (204, b"")
    assert ask(server, "get_info", {"model_id": model_id}).status == 404


@covers(routes=(7,))
def test_capabilities_name_the_advertised_models(client: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    client.create_sampling_client(base_model="qwen3").result().compute_logprobs(prompt(*TEXT)).result()
    listed = {m.model_name: m for m in rest.get_server_capabilities().result().supported_models}
    assert {"llama", "qwen3"} <= listed.keys()
    assert listed["qwen3"].max_context_length == 1024


@covers(routes=(8,), points=(4,))
def test_a_model_is_named_after_its_session_and_its_number(client: tinker.ServiceClient) -> None:
    first, second = new_trainer(client), new_trainer(client, "qwen3")
    session_id = client.holder.get_session_id()
    assert first.model_id == f"{session_id}:train:0"
    assert second.model_id == f"{session_id}:train:1"


@covers(routes=(9,), points=(13,))
def test_get_info_names_a_tokeniser_that_needs_no_hub(
    client: tinker.ServiceClient, byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    trainer = new_trainer(client, str(byte_model_dir), rank=6)
    info = trainer.get_info()
    assert (info.is_lora, info.lora_rank, info.model_data.model_name) == (True, 6, str(byte_model_dir))
    assert trainer.get_tokenizer().encode("Hi") == [72, 105]
    sampler = trainer.save_weights_and_get_sampling_client().result()
    assert sampler.get_tokenizer().encode("Hi") == [72, 105]


@covers(routes=(12, 20))
def test_a_saved_state_has_a_path_a_time_to_live_and_a_unique_name(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    trainer = new_trainer(client)
    path = trainer.save_state("s", ttl_seconds=7200).result().path
    assert path == f"tinker://{trainer.model_id}/weights/s"
    with pytest.raises(tinker.RequestFailedError, match="already exists"):
        trainer.save_state("s").result()
    (listed,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert listed.tinker_path == path
    assert listed.expires_at is not None
    assert abs(listed.expires_at - datetime.now(UTC) - timedelta(hours=2)) < timedelta(minutes=1)
    assert trainer.save_state("s", overwrite=True).result().path == path
    (listed,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert listed.expires_at is None


@covers(routes=(15, 16), points=(12,))
def test_a_sampler_knows_its_base_model(client: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    path = new_trainer(client, "qwen3").save_weights_for_sampler("w").result().path
    sampler = client.create_sampling_client(path).result()
    assert sampler.get_base_model() == "qwen3"
    record = rest.get_sampler(f"{client.holder.get_session_id()}:sample:0").result()
    assert (record.base_model, record.model_path) == ("qwen3", path)
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(f"{path}-not").result()


@covers(routes=(18,), points=(9,))
def test_a_slow_result_is_408_until_it_is_complete(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_LONG_POLL_S", 0.01)
    model_id = open_model(server, open_session(server))
    waiting = ask(server, "save_weights", {"model_id": model_id, "seq_id": 2, "path": "later"})
    reply = ask(server, "retrieve_future", {"request_id": waiting.json["request_id"]})
    assert reply.status == 408
    assert (reply.json["type"], reply.json["queue_state"]) == ("try_again", "active")
    ask(server, "forward_backward", train_request(model_id, 1), media_type="application/x-protobuf")
    assert await_answer(server, waiting).status == 200
    sampler = client.create_sampling_client(base_model="llama").result()
    params = types.SamplingParams(max_tokens=200, stop=[])  # many times the hold
    assert len(sampler.sample(prompt(*TEXT), 1, params).result().sequences[0].tokens) == 200


@covers(routes=(18,), points=(9,))
def test_a_failure_has_a_category_and_the_client_continues(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(client)
    with pytest.raises(tinker.RequestFailedError, match="nonsense") as failure:
        trainer.forward_backward([ce_datum(TEXT)], "ppo", {"nonsense": 1.0}).result()
    assert failure.value.category is types.RequestErrorCategory.User
    runtime = server._service._runtime  # pyright: ignore[reportPrivateUsage]
    with monkeypatch.context() as broken:
        broken.setattr(runtime, "optim_step", lambda *_: 1 / 0)
        with pytest.raises(tinker.RequestFailedError, match="ZeroDivisionError") as failure:
            trainer.optim_step(ADAM).result()
    assert failure.value.category is types.RequestErrorCategory.Server
    step(trainer)
    assert ask(server, "retrieve_future", {"request_id": "never made"}).status in (404, 410)


@covers(routes=(19,))
def test_a_sample_can_be_cancelled(server: EngineServer, client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="llama").result()
    sampler_id = f"{client.holder.get_session_id()}:sample:0"
    endless = {
        "num_samples": 64,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT}]},
        "sampling_params": {"max_tokens": 1000, "stop": []},
        "sampling_session_id": sampler_id,
        "seq_id": 10**6,
    }
    pending = ask(server, "asample", endless)
    assert ask(server, "cancel_future", {"request_id": pending.json["request_id"]}).status in (200, 204)
    reply = ask(server, "retrieve_future", {"request_id": pending.json["request_id"]})
    assert reply.status in (404, 410) or "error" in reply.json
    assert sampler.compute_logprobs(prompt(*TEXT)).result()[0] is None


@covers(routes=(19,))
def test_cancelling_a_request_of_an_ended_session_is_no_error(server: EngineServer) -> None:
    session = open_session(server)
    assert ask(server, f"sessions/{session}/finish").status == 204
    ended_request = {"request_id": f"{session}:sample:0#1"}
    assert ask(server, "cancel_future", ended_request).status == 204
    assert ask(server, "retrieve_future", ended_request).status == 404
    assert ask(server, "cancel_future", {"request_id": "nobody:sample:0#1"}).status == 404


def test_querying_the_state_of_a_session_does_not_end_it(server: EngineServer) -> None:
    session_id = open_session(server)
    sessions = server._service.sessions  # pyright: ignore[reportPrivateUsage]
    assert not sessions.has_ended(f"{session_id}:sample:0#1")
    assert ask(server, "session_heartbeat", {"session_id": session_id}).status == 200
    ask(server, f"sessions/{session_id}/finish")
    assert sessions.has_ended(f"{session_id}:sample:0#1")
    assert not sessions.has_ended("nobody:sample:0#1")


@covers(routes=(14, 15, 17))
def test_an_unsupported_field_that_changes_the_meaning_is_rejected_by_name(
    server: EngineServer, client: tinker.ServiceClient
) -> None:
    trainer = new_trainer(client)
    state = trainer.save_state("refused").result().path
    weights = trainer.save_weights_for_sampler("refused").result().path
    with pytest.raises(tinker.RequestFailedError, match="optimizer_config: 'dimuon' is not supported"):
        client.create_training_client_from_state(state, optimizer=types.DimuonOptimizerConfig()).result()
    sampling = {"session_id": open_session(server), "sampling_session_seq_id": 0, "model_path": weights}
    refused = ask(server, "create_sampling_session", sampling | {"base_model": "qwen3"})
    assert (refused.status, "not from 'qwen3'" in refused.json["detail"]) == (400, True)
    valid_body = {
        "sampling_session_id": ask(server, "create_sampling_session", sampling).json["sampling_session_id"],
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT}]},
        "sampling_params": {"max_tokens": 1},
    }
    for seq_id, (name, value, status) in enumerate(
        [
            ("base_model", "qwen3", 400),
            ("model_path", state, 400),
            ("base_model", "llama", 200),
            ("model_path", weights, 200),
        ]
    ):
        reply = ask(server, "asample", valid_body | {"seq_id": seq_id, name: value})
        assert reply.status == status
        assert status == 200 or name in reply.json["detail"]


@covers(routes=(3, 14, 20))
def test_fields_of_the_hosted_service_are_accepted_and_ignored(
    server: EngineServer, client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    assert ask(server, "create_session", SESSION | {"tags": ["a"], "project_id": "any"}).status == 200
    path = new_trainer(client).save_state("accepted").result().path
    assert client.create_training_client_from_state(path, weights_access_token="any").result().get_info().lora_rank == 4
    assert rest.copy_weights(path, "any-project", weights_access_token="any").result().endswith("/weights/accepted")
    trainer = new_trainer(client)
    expected = loss(trainer)
    spans = [types.PromptProvenanceSpan(sequence_id="any", length=len(TEXT) - 1)]
    datum = ce_datum(TEXT).with_provenance(model_input=spans, loss_fn_inputs=spans)
    assert trainer.forward([datum], "cross_entropy").result().metrics["loss:sum"] == expected


@covers(routes=(20,))
def test_checkpoints_are_listed_described_given_a_time_to_live_and_deleted(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    trainer = client.create_lora_training_client(
        base_model="llama", rank=4, train_mlp=False, user_metadata={"renderer_name": "r"}
    ).result()
    state, weights = trainer.save_state("a").result().path, trainer.save_weights_for_sampler("b").result().path
    run = rest.get_training_run_by_tinker_path(state).result()
    assert (run.training_run_id, run.base_model, run.lora_rank) == (trainer.model_id, "llama", 4)
    assert run.user_metadata == {"renderer_name": "r"}
    assert trainer.model_id in {r.training_run_id for r in rest.list_training_runs().result().training_runs}
    listed = {c.tinker_path: c for c in rest.list_checkpoints(trainer.model_id).result().checkpoints}
    assert {path: c.checkpoint_type for path, c in listed.items()} == {state: "training", weights: "sampler"}
    info = rest.get_weights_info_by_tinker_path(state).result()
    assert (info.base_model, info.is_lora, info.lora_rank, info.train_mlp) == ("llama", True, 4, False)
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    rest.delete_checkpoint_from_tinker_path(weights).result()
    (left,) = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert left.tinker_path == state
    assert left.expires_at is not None
    with pytest.raises(tinker.NotFoundError):
        client.create_sampling_client(weights).result()


def test_every_part_of_the_protocol_has_a_case() -> None:
    assert test_conformance_numbers.__name__, "imported for its cases"
    assert test_conformance_training.__name__, "imported for its cases"
    assert covered_routes == ROUTES.keys()
    assert covered_points == POINTS.keys()


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_a_model_takes_no_checkpoint_of_another_rank(server: EngineServer) -> None:
    with connect(server) as client:
        four, other, eight = (
            client.create_lora_training_client("qwen3", rank=rank, seed=seed).result()
            for rank, seed in ((4, 0), (4, 1), (8, 0))
        )
        path = four.save_state("four").result().path
        other.load_state(path).result()
        with pytest.raises(tinker.TinkerError, match=r"has another base model, rank or set of trained layers than .*"):
            eight.load_state(path).result()
        assert eight.get_info().lora_rank == 8
