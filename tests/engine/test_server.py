"""The engine as the unmodified Tinker SDK sees it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from rlkit.engine import EngineServer
from rlkit.engine.training.learner import Learner
from rlkit.errors import UsageError
from tests.limits import HANG_S

from .conformance import ask, open_model, open_session
from .conftest import connect
from .helpers import ce_datum, logprobs_of, prompt, rl_datum

TEXT = [72, 101, 108, 108, 111, 44, 32]
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_sampler_and_trainer_agree_before_and_after_training_steps(client: tinker.ServiceClient, family: str) -> None:
    trainer = client.create_lora_training_client(base_model=family, rank=8, seed=1).result()
    for _ in range(3):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=12, seed=3, stop=[])
        sequences = sampler.sample(prompt(*TEXT), 4, params).result().sequences
        data = [rl_datum(TEXT, s, a) for s, a in zip(sequences, (1.0, -1.0, 0.5, 0.0), strict=True)]
        output = trainer.forward(data, "importance_sampling").result()
        for trained, sequence in zip(logprobs_of(output), sequences, strict=True):
            np.testing.assert_allclose(trained[len(TEXT) - 1 :], sequence.logprobs, atol=1e-4)
        trainer.forward_backward(data, "importance_sampling")
        trainer.optim_step(ADAM).result()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_result_does_not_depend_on_the_batch(resolve: Callable[[str], Path], tmp_path: Path, threads: int) -> None:
    with EngineServer(root=tmp_path, resolve=resolve, threads=threads) as server, connect(server) as client:
        _check_batch_independence(client)


@pytest.mark.parametrize(("threads", "lanes"), [(None, 1), (1, 1), (2, 2)])
def test_the_number_of_threads_applies_to_a_tiny_model(
    resolve: Callable[[str], Path], tmp_path: Path, threads: int | None, lanes: int
) -> None:
    with EngineServer(root=tmp_path, resolve=resolve, threads=threads, device="cpu") as server:
        with connect(server) as client:
            trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
            model = server._service._runtime._models[trainer.model_id]  # pyright: ignore[reportPrivateUsage]
        assert model.learner._lanes.count == lanes  # pyright: ignore[reportPrivateUsage]


def _check_batch_independence(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="qwen3", rank=8, seed=1).result()
    trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
    trainer.optim_step(ADAM).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    # Lengths on both sides of a cache bucket, and one that moves to the next bucket while it is decoded.
    prompts = [[(i * 31 + j) % 256 for j in range(n)] for i, n in enumerate([7, 1, 30, 62, 64, 65, 130, 3])]
    limits = [5, 20, 40, 10, 3, 1, 12, 8]

    def ask(i: int) -> tinker.APIFuture[types.SampleResponse]:
        params = types.SamplingParams(max_tokens=limits[i], seed=i, stop=[], top_p=1 - 0.1 * (i % 2))
        return sampler.sample(prompt(*prompts[i]), 1 + i % 3, params, include_prompt_logprobs=True)

    def flat(response: types.SampleResponse) -> list[np.ndarray]:
        sequences = [part for s in response.sequences for part in (s.tokens_np, s.logprobs_np)]
        return [np.asarray(response.prompt_logprobs_np), *(np.asarray(part) for part in sequences)]

    alone = [flat(ask(i).result()) for i in range(8)]
    for order in (range(8), [5, 2, 7, 0, 6, 1, 4, 3]):
        answers = [flat(future.result()) for future in [ask(i) for i in order]]
        for i, answer in zip(order, answers, strict=True):
            for expected, actual in zip(alone[i], answer, strict=True):
                np.testing.assert_array_equal(expected, actual)


def test_a_training_loop_is_repeated_bit_for_bit_on_a_fresh_server(
    resolve: Callable[[str], Path], tmp_path: Path
) -> None:
    def run(root: Path) -> list[np.ndarray]:
        arrays: list[np.ndarray] = []
        with EngineServer(root=root, resolve=resolve) as server, connect(server) as client:
            trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=7).result()
            for step in range(4):
                sampler = trainer.save_weights_and_get_sampling_client().result()
                params = types.SamplingParams(max_tokens=8, seed=step, stop=[])
                futures = [sampler.sample(prompt(*TEXT, i), 4, params) for i in range(4)]
                sequences = [(i, s) for i, f in enumerate(futures) for s in f.result().sequences]
                data = [rl_datum([*TEXT, i], s, float(s.tokens[0] % 3 - 1)) for i, s in sequences]
                output = trainer.forward_backward(data, "ppo").result()
                trainer.optim_step(ADAM).result()
                arrays += logprobs_of(output)
            arrays += logprobs_of(trainer.forward(data, "ppo").result())
        return arrays

    for first, second in zip(run(tmp_path / "a"), run(tmp_path / "b"), strict=True):
        np.testing.assert_array_equal(first, second)


def test_an_old_sampler_keeps_its_weights(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=8, seed=1).result()
    unnamed = trainer.save_weights_and_get_sampling_client().result()
    named = client.create_sampling_client(trainer.save_weights_for_sampler("start").result().path).result()
    before = unnamed.compute_logprobs(prompt(*TEXT)).result()
    trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
    trainer.optim_step(ADAM).result()
    newer = [trainer.save_weights_and_get_sampling_client().result() for _ in range(4)]
    assert all(sampler.compute_logprobs(prompt(*TEXT)).result() != before for sampler in newer)
    assert unnamed.compute_logprobs(prompt(*TEXT)).result() == before
    assert named.compute_logprobs(prompt(*TEXT)).result() == before


@pytest.mark.parametrize("with_optimiser", [True, False])
def test_training_resumes_identically_in_a_new_server(
    resolve: Callable[[str], Path], tmp_path: Path, with_optimiser: bool
) -> None:
    data = [ce_datum(TEXT), ce_datum(TEXT[::-1])]

    def steps(trainer: tinker.TrainingClient, count: int) -> list[np.ndarray]:
        arrays: list[np.ndarray] = []
        for _ in range(count):
            arrays += logprobs_of(trainer.forward_backward(data, "cross_entropy").result())
            trainer.optim_step(ADAM).result()
        return arrays

    with EngineServer(root=tmp_path, resolve=resolve) as server, connect(server) as client:
        trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=7).result()
        steps(trainer, 2)
        path = trainer.save_state("two").result().path
        expected = steps(trainer, 3)
    with EngineServer(root=tmp_path, resolve=resolve) as server, connect(server) as client:
        if with_optimiser:
            resumed = client.create_training_client_from_state_with_optimizer(path).result()
        else:
            resumed = client.create_training_client_from_state(path).result()
        assert resumed.get_info().lora_rank == 4
        actual = steps(resumed, 3)
        assert resumed.save_state("two").result().path != path
    same = [np.array_equal(a, b) for a, b in zip(expected, actual, strict=True)]
    assert same[:2] == [True, True]
    assert all(same) == with_optimiser


def test_the_digit_task_is_learnt_in_twenty_steps(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=16, seed=0).result()
    digits = set(range(48, 58))
    reward = 0.0
    for step in range(20):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, seed=step, stop=[])
        sequences = sampler.sample(prompt(*TEXT), 64, params).result().sequences
        rewards = np.array([np.mean([t in digits for t in s.tokens]) for s in sequences])
        reward = float(rewards.mean())
        data = [rl_datum(TEXT, s, float(r - reward)) for s, r in zip(sequences, rewards, strict=True)]
        trainer.forward_backward(data, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=3e-2)).result()
    assert reward > 0.9


def test_a_custom_loss_runs_on_the_client(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    output = trainer.forward_backward_custom([ce_datum(TEXT)], lambda _, logps: (-logps[0].sum(), {"n": 6.0})).result()
    reference = trainer.forward([ce_datum(TEXT)], "cross_entropy").result()
    assert output.metrics["n"] == 6.0
    assert output.metrics["loss:sum"] == pytest.approx(reference.metrics["loss:sum"], rel=1e-5)
    assert trainer.optim_step(ADAM).result().metrics["unclipped_grad_l2:mean"] > 0


def test_chunks_that_arrive_out_of_order_run_in_order(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    data = [ce_datum([i % 256, (i * 7) % 256, 5]) for i in range(1500)]  # more than the SDK sends in one request
    output = trainer.forward(data, "cross_entropy").result()
    assert len(output.loss_fn_outputs) == 1500
    alone = trainer.forward(data[1400:1401], "cross_entropy").result()
    np.testing.assert_allclose(logprobs_of(output)[1400], logprobs_of(alone)[0], atol=1e-5)


def test_samples_end_at_their_stop_conditions(client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="llama").result()

    def lengths(stop: list[int] | None) -> list[int]:
        params = types.SamplingParams(max_tokens=40, seed=0, temperature=20.0, stop=stop)
        return [len(s.tokens) for s in sampler.sample(prompt(*TEXT), 32, params).result().sequences]

    assert set(lengths([])) == {40}
    stopped = lengths(list(range(100)))
    assert max(stopped) < 40
    params = types.SamplingParams(max_tokens=40, seed=0, temperature=20.0, stop=list(range(100)))
    for sequence in sampler.sample(prompt(*TEXT), 4, params).result().sequences:
        assert sequence.stop_reason == "stop"
        assert sequence.tokens[-1] < 100 <= min(sequence.tokens[:-1], default=100)
    assert len(set(lengths(None))) > 1  # the end token, 258, comes up now and then


@pytest.mark.parametrize(
    ("loss", "config", "field"),
    [
        ("gspo", None, "gspo"),
        ("stable_reinforce", None, "stable_reinforce"),
        ("ppo", {"clip_low": 0.8}, "clip_low"),
        ("cross_entropy", None, "advantages"),
    ],
)
def test_an_unsupported_loss_is_rejected_by_name(
    client: tinker.ServiceClient, loss: types.LossFnType, config: dict[str, float | str] | None, field: str
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    datum = ce_datum(TEXT)
    if loss == "cross_entropy":
        datum.loss_fn_inputs["advantages"] = datum.loss_fn_inputs["weights"]
    with pytest.raises(tinker.RequestFailedError, match=field) as failure:
        trainer.forward_backward([datum], loss, config).result()
    assert failure.value.category is types.RequestErrorCategory.User
    trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result()  # the client is not poisoned


def test_an_unknown_model_fails_its_future_with_the_resolvers_message(client: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="'nope' was not found") as failure:
        client.create_lora_training_client(base_model="nope").result()
    assert failure.value.category is types.RequestErrorCategory.User


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", "x" * 200])
def test_a_checkpoint_name_cannot_leave_its_folder(client: tinker.ServiceClient, name: str) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    with pytest.raises(tinker.RequestFailedError, match="checkpoint name"):
        trainer.save_state(name).result()


def test_malformed_requests_are_rejected_and_the_server_survives(server: EngineServer) -> None:
    def post(path: str, body: bytes, key: str = server.api_key, kind: str = "application/json") -> int:
        request = urllib.request.Request(f"{server.url}/api/v1/{path}", body, {"X-API-Key": key, "Content-Type": kind})
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    session = json.dumps({"tags": [], "user_metadata": None, "sdk_version": "0"}).encode()
    assert post("create_session", session) == 200
    assert post("create_session", session, key="tml-wrong") == 401
    assert post("create_session", session, key="") == 401
    assert post("create_session", b"{") == 422
    assert post("create_session", b"[]") == 422
    assert post("forward_backward", b"\xff\xfe garbage", kind="application/x-protobuf") == 400
    assert post("forward_backward", b"", kind="application/x-protobuf") == 404
    assert post("retrieve_future", b'{"request_id": "none"}') == 404
    assert post("optim_step", b'{"model_id": "none", "seq_id": 1, "adam_params": {}}') == 404
    assert post("asample", b'{"sampling_session_id": "none"}') == 422
    assert post("load_weights", b'{"path": "tinker://../x", "optimizer": false}') == 400
    assert post("weights_info", b'{"tinker_path": "tinker://x:train:0/weights/../../y"}') == 400
    assert post("telemetry", b"x" * (65 << 20)) == 413
    assert post("nowhere", b"{}") == 404
    assert post("create_session", session) == 200


def test_stop_answers_open_requests(
    resolve: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineServer(root=tmp_path, resolve=resolve) as server:
        service = server._service  # pyright: ignore[reportPrivateUsage]
        name = f"{service.sessions.open().session_id}:never"
        waiting, _ = service.promises.get_or_make(name)
        answers: list[bytes] = []

        def ask() -> None:
            headers = {"X-API-Key": server.api_key, "Content-Type": "application/json"}
            url = f"{server.url}/api/v1/retrieve_future"
            request = urllib.request.Request(url, json.dumps({"request_id": name}).encode(), headers)
            with urllib.request.urlopen(request, timeout=HANG_S) as reply:
                answers.append(reply.read())

        blocked, wait = threading.Event(), type(waiting).wait

        async def noted(*args: Any) -> object:
            blocked.set()
            return await wait(*args)

        monkeypatch.setattr(type(waiting), "wait", noted)
        asking = threading.Thread(target=ask)
        asking.start()
        assert blocked.wait(HANG_S)
        assert not waiting.done
    asking.join()
    assert b"the engine was stopped" in answers[0]


def test_stop_waits_for_at_most_one_micro_batch(
    resolve: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running, computed = threading.Event(), list[float]()
    compute = Learner._run_micro_batch  # pyright: ignore[reportPrivateUsage] a tiny model's would be too short to tell

    def slow(*args: Any, **kwargs: Any) -> object:
        running.set()
        time.sleep(0.2)
        computed.append(0.2)
        return compute(*args, **kwargs)

    monkeypatch.setattr(Learner, "_run_micro_batch", slow)
    with EngineServer(root=tmp_path, resolve=resolve) as server:
        session_id = open_session(server)
        model_id = open_model(server, session_id)
        data = types.ForwardBackwardInput(
            data=[ce_datum([i % 100, i // 100, *range(199)]) for i in range(500)], loss_fn="cross_entropy"
        )
        request = types.ForwardBackwardRequest(forward_backward_input=data, model_id=model_id, seq_id=1)
        body = forward_backward_request_to_proto(request).SerializeToString()
        assert ask(server, "forward_backward", body, media_type="application/x-protobuf").status == 200
        assert running.wait(HANG_S)
        promise = server._service.promise(f"{model_id}#1")  # pyright: ignore[reportPrivateUsage]
        server.stop()
    assert len(computed) < 100, "the request has 200 micro-batches at least"
    answer = asyncio.run(promise.wait(0))
    assert answer is not None
    assert b"the engine was stopped" in answer.body
    assert caplog.records == []


def test_a_request_that_is_sent_twice_runs_once(server: EngineServer, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
    trainer.optim_step(ADAM).result()
    before = trainer.forward([ce_datum(TEXT)], "cross_entropy").result()
    again = types.OptimStepRequest(model_id=trainer.model_id, seq_id=2, optim_params=ADAM)
    promise = server._service.optim_step(again)  # pyright: ignore[reportPrivateUsage]
    other = types.OptimStepRequest(model_id=trainer.model_id, seq_id=2, optim_params=types.AdamParams(learning_rate=9))
    with pytest.raises(UsageError, match="another content"):
        server._service.optim_step(other)  # pyright: ignore[reportPrivateUsage]
    after = trainer.forward([ce_datum(TEXT)], "cross_entropy").result()
    assert promise.done
    assert after.metrics == before.metrics


def test_named_sampler_weights_cannot_be_replaced(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    trainer.save_weights_for_sampler("one").result()
    with pytest.raises(tinker.RequestFailedError, match="already exists"):
        trainer.save_weights_for_sampler("one").result()
    state = trainer.save_state("one").result().path
    with pytest.raises(tinker.BadRequestError, match="save_weights_for_sampler"):
        client.create_sampling_client(state).result()


@pytest.mark.parametrize(("field", "value"), [("threads", 0), ("threads", 10**20), ("host", "")])
def test_invalid_server_settings_are_rejected_by_name(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field):
        EngineServer(root=tmp_path, **{field: value})  # pyright: ignore[reportArgumentType]  one of two types


def test_the_server_listens_on_localhost_by_default(tmp_path: Path) -> None:
    with EngineServer(root=tmp_path) as server:
        assert server.url.startswith("http://127.0.0.1:")


def test_stop_leaves_no_thread_and_can_be_repeated(resolve: Callable[[str], Path], tmp_path: Path) -> None:
    before = set(threading.enumerate())
    server = EngineServer(root=tmp_path, resolve=resolve)
    with pytest.raises(UsageError, match="before start"):
        _ = server.url
    server.start()
    assert len(set(threading.enumerate()) - before) == 2
    server.stop()
    server.stop()
    assert set(threading.enumerate()) <= before
