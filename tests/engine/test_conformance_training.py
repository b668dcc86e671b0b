"""Training over the Tinker protocol: requests, their order, their effect, and the weights that come of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tinker
from starlette.responses import JSONResponse
from tinker.proto import tinker_public_pb2 as pb

from rlkit.engine import EngineServer
from rlkit.engine.server import routes

from .conformance import (
    ADAM,
    TEXT,
    ask,
    await_answer,
    covers,
    loss,
    new_trainer,
    open_model,
    open_session,
    step,
    train_request,
)
from .conftest import connect
from .helpers import ce_datum, logprobs_of, prompt


@covers(routes=(8,))
def test_lora_flags_and_seed_decide_the_trained_weights(client: tinker.ServiceClient) -> None:
    def after_one_step(**settings: object) -> float:
        trainer = new_trainer(client, **settings)
        step(trainer)
        return loss(trainer)

    whole = after_one_step()
    assert after_one_step() == whole
    assert after_one_step(seed=1) != whole
    parts = ("train_attn", "train_mlp", "train_unembed")
    assert len({whole, *(after_one_step(**{part: False}) for part in parts)}) == 4


@covers(routes=(10,), points=(5, 6))
def test_a_training_request_and_its_result_are_protobuf(server: EngineServer) -> None:
    model_id = open_model(server, open_session(server))
    body = train_request(model_id, 1, forward_only=True)
    answer = await_answer(server, ask(server, "forward_backward", body, media_type="application/x-protobuf"))
    assert answer.media_type == "application/x-protobuf"
    output = pb.ForwardBackwardOutput.FromString(answer.body)
    (record,) = output.loss_fn_outputs
    assert output.loss_fn_output_type == "ArrayRecord"
    assert record.num_datums == 1
    field = record.fields["logprobs"]
    values = np.frombuffer(field.data, np.float32)
    assert np.frombuffer(field.offsets, np.int64).tolist() == [0, values.nbytes]
    # weights may be left out: every token counts once
    assert output.metrics["loss:sum"] == pytest.approx(-values.sum(dtype=np.float64), rel=1e-5)


@covers(routes=(10, 18), points=(10,))
def test_a_request_that_is_sent_twice_is_run_once(server: EngineServer) -> None:
    model_id = open_model(server, open_session(server))
    replies = [
        ask(server, "forward_backward", train_request(model_id, 1), media_type="application/x-protobuf")
        for _ in range(2)
    ]
    first, second = (await_answer(server, reply).body for reply in replies)
    assert first == second
    adam = {"learning_rate": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    norms = []
    for seq_id, resent in ((2, 1), (4, 2)):  # the gradient of one request, then of two
        if resent == 2:
            ask(server, "forward_backward", train_request(model_id, 3), media_type="application/x-protobuf")
        reply = await_answer(
            server, ask(server, "optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": adam})
        )
        norms.append(reply.json["metrics"]["unclipped_grad_l2:mean"])
    assert norms[0] == norms[1]


@covers(routes=(10,), points=(10,))
def test_a_later_request_waits_for_the_earlier_one(server: EngineServer) -> None:
    model_id = open_model(server, open_session(server))
    later = ask(server, "save_weights", {"model_id": model_id, "seq_id": 2, "path": "two"})
    ask(server, "forward_backward", train_request(model_id, 1), media_type="application/x-protobuf")
    assert await_answer(server, later).json["path"] == f"tinker://{model_id}/weights/two"


@covers(routes=(10,), points=(8, 10))
def test_chunks_are_put_together_in_order(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    data = [ce_datum([i % 256, i // 256, i % 7]) for i in range(1100)]  # 1024 go in one request, the first one last
    output = trainer.forward_backward(data, "cross_entropy").result()
    rows = logprobs_of(output)
    assert output.metrics["loss:sum"] == pytest.approx(-sum(float(row.sum()) for row in rows), rel=1e-5)
    for i in (0, 1023, 1024, 1099):
        alone = logprobs_of(trainer.forward([data[i]], "cross_entropy").result())[0]
        np.testing.assert_allclose(rows[i], alone, atol=1e-5)
    assert all(len(key.split(":")) == 2 for key in output.metrics)


@covers(routes=(1, 10), points=(2, 5))
def test_training_requests_may_be_compressed(
    client: tinker.ServiceClient, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asks_for_it(*_: object) -> JSONResponse:
        return JSONResponse({"proto_compress_fwdbwd": True}, headers={"Connection": "close"})

    monkeypatch.setattr(routes._Handlers, "client_config", asks_for_it)  # pyright: ignore[reportPrivateUsage]
    with EngineServer(root=tmp_path, resolve=lambda name: models[name]) as server, connect(server) as compressing:
        assert compressing.holder.get_client_config().proto_compress_fwdbwd
        assert loss(new_trainer(compressing)) == loss(new_trainer(client))


@covers(routes=(11,), points=(8,))
def test_optim_step_applies_the_gradient_once_and_reports_its_norm(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    before = loss(trainer)  # a forward pass leaves no gradient behind
    assert trainer.optim_step(ADAM).result().metrics == {"unclipped_grad_l2:mean": 0.0}
    assert loss(trainer) == before
    step(trainer)
    assert loss(trainer) < before
    assert trainer.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] == 0.0


@covers(routes=(13,), points=(11,))
def test_saved_sampler_weights_do_not_change(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    path = trainer.save_weights_for_sampler("w").result().path
    assert path == f"tinker://{trainer.model_id}/sampler_weights/w"
    samplers = [
        client.create_sampling_client(path).result(),
        trainer.save_weights_and_get_sampling_client().result(),
    ]
    before = [sampler.compute_logprobs(prompt(*TEXT)).result() for sampler in samplers]
    step(trainer)
    assert [sampler.compute_logprobs(prompt(*TEXT)).result() for sampler in samplers] == before
    newer = trainer.save_weights_and_get_sampling_client().result()
    assert newer.compute_logprobs(prompt(*TEXT)).result() not in before


@covers(routes=(13,))
def test_inflight_samplers_of_a_model_share_new_weights(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    old = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    before = old.compute_logprobs(prompt(*TEXT)).result()
    step(trainer)
    assert old.compute_logprobs(prompt(*TEXT)).result() == before, "nothing was published yet"
    new = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    after = new.compute_logprobs(prompt(*TEXT)).result()
    assert after != before
    assert old.compute_logprobs(prompt(*TEXT)).result() == after


@covers(routes=(14,), points=(4,))
def test_training_resumes_bit_for_bit_with_the_optimiser_and_afresh_without(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    step(trainer)
    path = trainer.save_state("one").result().path
    same = client.create_training_client_from_state_with_optimizer(path).result()
    fresh = client.create_training_client_from_state(path).result()
    assert same.model_id == f"{client.holder.get_session_id()}:train:1"
    assert loss(trainer) == loss(same) == loss(fresh)
    for each in (trainer, same, fresh):
        step(each)
    assert loss(trainer) == loss(same) != loss(fresh)
    with pytest.raises(tinker.RequestFailedError, match="qwen3"):
        client.create_training_client_from_state(path, base_model="qwen3").result()


@covers(routes=(19,))
def test_a_custom_loss_is_rejected_by_the_server_and_runs_on_the_client(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    with pytest.raises((tinker.BadRequestError, tinker.NotFoundError, tinker.RequestFailedError)):
        trainer.forward_backward([ce_datum(TEXT)], "custom", {"loss_id": "x"}).result()

    def likelihood(logprobs, weights):
        value = -(logprobs * weights).sum()
        return value, {"custom/likelihood:sum": value}

    handle = client.create_custom_loss(likelihood, input_ranks={"logprobs": 1, "weights": 1}).result()
    output = trainer.forward_backward_custom([ce_datum(TEXT)], handle).result()
    assert output.metrics["custom/likelihood:sum"] == pytest.approx(loss(trainer), rel=1e-5)
