"""Behaviour that the test suites of other Tinker servers check and the rest of these tests do not."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import numpy as np
import pytest
import tinker
from tinker import types

from rlkit.engine import EngineServer

from .conformance import ADAM, TEXT, ask, await_answer, loss, new_trainer, open_model, open_session, step, train_request
from .helpers import ce_datum, logprobs_of, prompt

OTHER_TEXT = [84, 105, 110, 107, 101, 114]


def weightless(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [0.0] * (len(tokens) - 1)}
    return types.Datum(model_input=prompt(*tokens[:-1]), loss_fn_inputs=inputs)


def loss_after(client: tinker.ServiceClient, *requests: list[types.Datum]) -> float:
    """Train a new adapter for one step on the gradient of all requests."""
    trainer = new_trainer(client)
    for data in requests:
        trainer.forward_backward(data, "cross_entropy")
    trainer.optim_step(ADAM).result()
    return loss(trainer)


def test_gradients_of_requests_add_up_and_weightless_data_add_nothing(client: tinker.ServiceClient) -> None:
    first, second, nothing = ce_datum(TEXT), ce_datum(OTHER_TEXT), weightless(OTHER_TEXT)
    together = loss_after(client, [first, second])
    assert loss_after(client, [first], [second]) == pytest.approx(together, rel=1e-5)
    assert loss_after(client, [nothing], [first, second], [nothing], [nothing]) == together
    alone = loss_after(client, [first])
    assert loss_after(client, [first, nothing]) == pytest.approx(alone, rel=1e-5)
    assert abs(alone - together) > 1e-3 * together


def test_a_weightless_datum_has_log_probabilities_and_no_loss(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    output = trainer.forward_backward([weightless(TEXT), ce_datum(OTHER_TEXT)], "cross_entropy").result()
    rows = logprobs_of(output)
    assert [len(row) for row in rows] == [len(TEXT) - 1, len(OTHER_TEXT) - 1]
    assert output.metrics["loss:sum"] == pytest.approx(-float(rows[1].sum()), rel=1e-5)
    assert (rows[0] < 0).all()


def test_a_model_goes_on_unchanged_after_another_is_unloaded(
    server: EngineServer, client: tinker.ServiceClient
) -> None:
    alone = new_trainer(client)
    for _ in range(2):
        step(alone)
    gone, remaining = new_trainer(client), new_trainer(client)
    step(remaining)
    gone.forward_backward([ce_datum(TEXT)], "cross_entropy").result()  # a gradient that is never applied
    unloaded = await_answer(server, ask(server, "unload_model", {"model_id": gone.model_id})).json
    assert unloaded["model_id"] == gone.model_id
    step(remaining)
    assert loss(remaining) == loss(alone)
    with pytest.raises(tinker.NotFoundError, match=f"there is no model '{gone.model_id}'"):
        loss(gone)


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_a_state_is_loaded_into_a_model_in_training(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    step(trainer)
    saved = loss(trainer)
    path = trainer.save_state("midway").result().path
    step(trainer)
    later = loss(trainer)
    assert later != saved
    trainer.load_state_with_optimizer(path).result()
    assert loss(trainer) == saved
    step(trainer)
    assert loss(trainer) == later
    trainer.load_state(path).result()
    assert loss(trainer) == saved
    step(trainer)
    assert loss(trainer) != later  # Adam began anew


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning")
def test_loading_a_state_drops_the_gradient_of_the_weights_before(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    path = trainer.save_state("start").result().path
    step(trainer)
    expected = loss(trainer)
    trainer.forward_backward([ce_datum(OTHER_TEXT)], "cross_entropy").result()
    trainer.load_state(path).result()
    step(trainer)
    assert loss(trainer) == expected


def test_a_state_and_a_sampler_of_one_name_are_two_checkpoints(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    trainer = new_trainer(client)
    state = trainer.save_state("name").result().path
    step(trainer)
    sampler = trainer.save_weights_for_sampler("name").result().path

    def listed() -> set[str]:
        return {c.tinker_path for c in rest.list_checkpoints(trainer.model_id).result().checkpoints}

    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint(trainer.model_id, "name").result()  # which of the two is not said
    assert listed() == {state, sampler}
    rest.delete_checkpoint(trainer.model_id, "weights/name").result()
    assert listed() == {sampler}
    values = client.create_sampling_client(sampler).result().compute_logprobs(prompt(*TEXT)).result()
    assert -np.sum(values[1:]) == pytest.approx(loss(trainer), rel=1e-5)


def test_only_one_of_several_requests_with_the_same_seq_id_runs(server: EngineServer) -> None:
    model_id = open_model(server, open_session(server))
    saves = [{"model_id": model_id, "seq_id": 1, "path": f"name{i}"} for i in range(8)]
    with ThreadPoolExecutor(len(saves)) as pool:
        replies = list(pool.map(lambda body: ask(server, "save_weights", body), saves))
    (accepted,) = (reply for reply in replies if reply.status == 200)
    for reply in replies:
        assert reply is accepted or (reply.status == 400 and "use a new seq_id" in reply.json["detail"])
    path = f"tinker://{model_id}/weights/name{replies.index(accepted)}"
    assert await_answer(server, accepted).json["path"] == path
    checkpoints = ask(server, f"training_runs/{model_id}/checkpoints", method="GET").json["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in checkpoints] == [path]


def test_a_client_that_stops_waiting_does_not_affect_others(server: EngineServer) -> None:
    model_id = open_model(server, open_session(server))
    pending = ask(server, "save_weights", {"model_id": model_id, "seq_id": 2, "path": "two"})  # until seq_id 1 came
    body = f'{{"request_id": "{pending.json["request_id"]}"}}'.encode()
    address = urlsplit(server.url)
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: engine\r\nX-API-Key: {server.api_key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with ThreadPoolExecutor(3) as pool:
        with socket.create_connection((address.hostname, address.port)) as impatient:
            impatient.sendall(head.encode() + body)
            patient = [pool.submit(await_answer, server, pending) for _ in range(3)]
        ask(server, "forward_backward", train_request(model_id, 1), media_type="application/x-protobuf")
        paths = [waiting.result().json["path"] for waiting in patient]
    assert paths == [f"tinker://{model_id}/weights/two"] * 3


def test_scores_of_the_prompt_are_returned_only_if_requested(client: tinker.ServiceClient) -> None:
    sampler = new_trainer(client).save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=2, seed=0, temperature=0.0)
    plain = sampler.sample(prompt(*TEXT), 1, params).result()
    assert plain.prompt_logprobs is None
    assert plain.topk_prompt_logprobs is None
    scored = sampler.sample(prompt(*TEXT), 3, params, include_prompt_logprobs=True).result()
    assert scored.prompt_logprobs == sampler.compute_logprobs(prompt(*TEXT)).result()
    assert scored.topk_prompt_logprobs is None
    assert [sequence.tokens for sequence in scored.sequences] == [plain.sequences[0].tokens] * 3


def test_a_setting_of_another_loss_is_rejected_by_name(client: tinker.ServiceClient) -> None:
    trainer = new_trainer(client)
    inputs = {"target_tokens": TEXT[1:], "logprobs": [-1.0] * 6, "advantages": [1.0] * 6}
    datum = types.Datum(model_input=prompt(*TEXT[:-1]), loss_fn_inputs=inputs)
    for loss_fn, setting in (("ppo", "clip_ratio"), ("ppo", "value_clip"), ("importance_sampling", "beta")):
        with pytest.raises(tinker.TinkerError, match=f"{loss_fn} has no setting '{setting}'"):
            trainer.forward_backward([datum], loss_fn, {setting: 0.2}).result()  # type: ignore[arg-type]  a literal
    trainer.forward_backward([datum], "ppo", {"clip_low_threshold": 0.9}).result()
