"""Sessions, futures and the wire: the SDK through a real server, and bare HTTP for what the SDK does not show."""

from __future__ import annotations

import gc
import json
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import pytest
import tinker
import torch
import zstandard
from tinker import types
from tinker.lib.internal_client_holder import InternalClientHolder
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from rlkit.engine import EngineServer
from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.server import futures, http_requests, request_order, routes, sessions, wire_format
from rlkit.engine.server.runtime import Runtime
from rlkit.engine.server.service import Service
from rlkit.errors import UsageError
from tests.limits import HANG_S, wait_until

from .conftest import connect
from .helpers import ce_datum, prompt

TEXT = [72, 101, 108, 108, 111]
ONE = types.SamplingParams(max_tokens=3, seed=1, stop=[])


def post(server: EngineServer, path: str, body: object, **headers: str) -> tuple[int, dict[str, object]]:
    """Status and JSON of a reply; `body` is JSON unless it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    default_headers = {"X-API-Key": server.api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", data, default_headers | headers)
    try:
        reply = urllib.request.urlopen(request, timeout=HANG_S)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        raw = reply.read()
        return reply.status or 0, json.loads(raw) if raw.startswith(b"{") else {}


def service_of(server: EngineServer) -> Service:
    return server._service  # pyright: ignore[reportPrivateUsage] what is left of a session is seen nowhere else


def on_server[T](server: EngineServer, call: Callable[[], T]) -> T:
    """Run something on the server's own thread."""
    done: list[T] = []
    finished = threading.Event()

    def run() -> None:
        done.append(call())
        finished.set()

    server._loop.call_soon_threadsafe(run)  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess] as above
    assert finished.wait(HANG_S)
    return done[0]


def settle(server: EngineServer) -> None:
    """Wait until the worker has done what it was given."""
    done = threading.Event()
    service_of(server)._worker.submit(done.set)  # pyright: ignore[reportPrivateUsage] as above
    assert done.wait(HANG_S)


@contextmanager
def busy_worker(server: EngineServer) -> Iterator[None]:
    """Keep the worker from everything else."""
    release = threading.Event()
    service_of(server)._worker.submit(lambda: release.wait(HANG_S) and None)  # pyright: ignore[reportPrivateUsage] as above
    try:
        yield
    finally:
        release.set()


def wait_for_jobs(server: EngineServer, count: int) -> None:
    """Wait until the worker, which is kept busy, has been given so many jobs of requests."""

    def jobs() -> int:
        return sum(p.is_submitted and not p.done for p in service_of(server).promises.with_prefix(""))

    wait_until(lambda: on_server(server, jobs) >= count)


@contextmanager
def later(server: EngineServer, by_s: float) -> Iterator[None]:
    """The server's clock put forward."""
    table = service_of(server).sessions
    table._clock = lambda: time.monotonic() + by_s  # pyright: ignore[reportPrivateUsage] as above
    try:
        yield
    finally:
        table._clock = time.monotonic  # pyright: ignore[reportPrivateUsage] as above


def sweep(server: EngineServer) -> None:
    on_server(server, service_of(server).end_silent_sessions)
    settle(server)


def left_of(server: EngineServer, session_id: str) -> list[str]:
    """Every trace of a session in the server's tables."""
    service = service_of(server)
    runtime = service._runtime  # pyright: ignore[reportPrivateUsage] as above
    snapshots = runtime._snapshots  # pyright: ignore[reportPrivateUsage] as above
    names = [session.session_id for session in service.sessions]
    names += [promise.request_id for promise in service.promises.with_prefix("")]
    names += list(runtime._models)  # pyright: ignore[reportPrivateUsage] as above
    served = runtime._samplers._served  # pyright: ignore[reportPrivateUsage] as above
    names += [ref.snapshot or "" for ref in served]
    names += [promise.request_id for weights in served.values() for promise in weights.tickets]
    names += [*snapshots._recent, *snapshots._spilled]  # pyright: ignore[reportPrivateUsage] as above
    return [name for name in names if session_id in name]


def test_a_silent_session_ends_and_leaves_nothing(server: EngineServer, client: tinker.ServiceClient) -> None:
    other = tinker.ServiceClient(base_url=server.url, api_key=server.api_key)
    trainer = other.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sampler.sample(prompt(*TEXT), 2, ONE).result()
    alive = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    session_id = trainer.model_id.partition(":")[0]
    early = {"model_id": trainer.model_id, "seq_id": 9, "adam_params": {}}  # a gap that never closes
    assert post(server, "optim_step", early)[0] == 200
    service = service_of(server)
    session = service.sessions.get(session_id)
    promise = service.promise(f"{trainer.model_id}#9")
    traces = [weakref.ref(x) for x in (session, promise, *session.queues.values())]
    del session, promise
    assert len(left_of(server, session_id)) > 3
    with later(server, sessions.SILENCE_S + 10):
        post(server, "session_heartbeat", {"session_id": alive.model_id.partition(":")[0]})
        sweep(server)
    assert left_of(server, session_id) == []
    gc.collect()
    assert [trace() for trace in traces] == [None] * 3
    assert post(server, "session_heartbeat", {"session_id": session_id})[0] == 410
    with pytest.raises(tinker.NotFoundError, match="no session"):
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result()
    alive.forward_backward([ce_datum(TEXT)], "cross_entropy").result()
    other.close("success").result()  # it ended already, which is no error


def test_a_session_whose_job_is_running_is_not_silent(server: EngineServer, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    expected = trainer.forward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"]
    with busy_worker(server):
        future = trainer.forward([ce_datum(TEXT)], "cross_entropy")
        wait_for_jobs(server, 1)
        with later(server, 2 * sessions.SILENCE_S):
            on_server(server, service_of(server).end_silent_sessions)
    assert future.result().metrics["loss:sum"] == expected


def test_the_samples_of_a_dead_client_are_dropped(server: EngineServer, client: tinker.ServiceClient) -> None:
    sampler = client.create_sampling_client(base_model="llama").result()
    alive = tinker.ServiceClient(base_url=server.url, api_key=server.api_key)
    with busy_worker(server):
        future = sampler.sample(prompt(*TEXT), 4, types.SamplingParams(max_tokens=1000))
        other = alive.create_sampling_client(base_model="llama").result().sample(prompt(*TEXT), 1, ONE)
        wait_for_jobs(server, 2)
        dead = next(session for session in service_of(server).sessions if session.samplers)
        with later(server, sessions.DEAD_S + 1):
            for session in service_of(server).sessions:
                if session is not dead:
                    post(server, "session_heartbeat", {"session_id": session.session_id})
            on_server(server, service_of(server).end_silent_sessions)
    assert other.result().sequences[0].tokens
    with pytest.raises(tinker.RequestFailedError, match="the sample was dropped: its client has sent nothing for 60 s"):
        future.result()
    assert sampler.sample(prompt(*TEXT), 1, ONE).result().sequences[0].tokens  # the session goes on


def test_a_sample_does_not_wait_for_queued_training(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    sampler = client.create_sampling_client(base_model="llama").result()
    began: list[str] = []
    train, sample = Runtime.train, Runtime.sample
    monkeypatch.setattr(Runtime, "train", lambda *args: (began.append("train"), train(*args))[1])
    monkeypatch.setattr(Runtime, "sample", lambda *args: (began.append("sample"), sample(*args))[1])
    with busy_worker(server):
        training = [trainer.forward([ce_datum(TEXT)], "cross_entropy") for _ in range(3)]
        sampling = sampler.sample(prompt(*TEXT), 1, ONE)
        wait_for_jobs(server, 4)
    assert len(sampling.result().sequences[0].tokens) == 3
    for future in training:
        future.result()
    assert began == ["sample", "train", "train", "train"]


@pytest.mark.parametrize("reason", ["success", "errored", "interrupted"])
def test_a_session_can_be_finished_for_any_reason_and_twice(
    server: EngineServer, reason: Literal["success", "errored", "interrupted"]
) -> None:
    client = tinker.ServiceClient(base_url=server.url, api_key=server.api_key)
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    session_id = trainer.model_id.partition(":")[0]
    client.close(reason, detail="as it was").result()
    settle(server)
    assert left_of(server, session_id) == []
    assert post(server, f"sessions/{session_id}/finish", {"reason": {"type": reason}})[0] == 204
    assert post(server, "sessions/nobody/finish", {"reason": {"type": reason}})[0] == 404


def test_waiting_requests_of_an_ended_session_are_answered_and_a_save_completes(server: EngineServer) -> None:
    with connect(server) as client:
        trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
        model_id = trainer.model_id
        session_id = model_id.partition(":")[0]
        assert post(server, "optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})[0] == 200
        answers: list[dict[str, object]] = []
        asking = threading.Thread(
            target=lambda: answers.append(post(server, "retrieve_future", {"request_id": f"{model_id}#2"})[1])
        )
        asking.start()
        dropped_promise = service_of(server).promise(f"{model_id}#2")
        wait_until(lambda: dropped_promise._wakers)  # pyright: ignore[reportPrivateUsage] until it is waited for
        with busy_worker(server):
            create = {"session_id": session_id, "model_seq_id": 7, "base_model": "llama", "lora_config": {"rank": 2}}
            assert post(server, "create_model", create)[0] == 200
            save = {"model_id": f"{session_id}:train:7", "seq_id": 1, "path": "last"}
            assert post(server, "save_weights", save)[0] == 200
            client.close("success").result()
        asking.join()
    assert answers == [{"error": "the session has ended", "category": "user"}]
    settle(server)
    assert service_of(server).store.get(f"tinker://{session_id}:train:7/weights/last").info.base_model == "llama"


def test_requests_of_an_ended_session_run_only_if_a_save_needs_them(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    step = Runtime.optim_step
    monkeypatch.setattr(Runtime, "optim_step", lambda *args: (ran.append(args[1]), step(*args))[1])
    with connect(server) as client:
        saved, other = (client.create_lora_training_client("llama", rank=2, seed=0).result().model_id for _ in "ab")
        with busy_worker(server):
            for seq_id in (1, 2, 4):
                assert post(server, "optim_step", {"model_id": saved, "seq_id": seq_id, "adam_params": {}})[0] == 200
                assert post(server, "optim_step", {"model_id": other, "seq_id": seq_id, "adam_params": {}})[0] == 200
            assert post(server, "save_weights", {"model_id": saved, "seq_id": 3, "path": "last"})[0] == 200
            unnamed = {"model_id": other, "seq_id": 3, "sampling_session_seq_id": 5}
            assert post(server, "save_weights_for_sampler", unnamed)[0] == 200
            client.close("success").result()
        settle(server)
    assert ran == [saved, saved]
    assert service_of(server).store.get(f"tinker://{saved}/weights/last").info.steps == 2


def test_a_model_cannot_be_reached_without_its_session_id(server: EngineServer, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    session_id = trainer.model_id.partition(":")[0]
    _, reply = post(server, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})
    stranger = str(reply["session_id"])
    assert min(len(session_id), len(stranger)) >= 16
    assert session_id != stranger
    for body in ({"seq_id": 1, "adam_params": {}}, {}):
        path = "optim_step" if body else "get_info"
        for model_id in (f"{stranger}:train:0", ":train:0", "train:0", f"{session_id}:train:1", f"{session_id}"):
            assert post(server, path, {"model_id": model_id, **body})[0] == 404
    body = {"session_id": stranger, "sampling_session_seq_id": 0}
    assert post(server, "create_sampling_session", body | {"model_path": "tinker://x:train:0/weights/a"})[0] == 400
    assert post(server, "retrieve_future", {"request_id": f"{stranger}:train:0#create"})[0] == 404


def test_a_pending_result_is_408_and_a_failure_is_200(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    monkeypatch.setattr(routes, "_LONG_POLL_S", 0.05)
    request_id = f"{trainer.model_id}#1"
    with busy_worker(server):
        body = {"model_id": trainer.model_id, "seq_id": 1, "adam_params": {"learning_rate": -1}}
        assert post(server, "optim_step", body) == (200, {"request_id": request_id})
        status, reply = post(server, "retrieve_future", {"request_id": request_id})
        assert (status, reply["type"], reply["queue_state"]) == (408, "try_again", "active")
    status, reply = post(server, "retrieve_future", {"request_id": request_id})
    assert (status, reply["category"]) == (200, "user")
    assert "learning_rate" in str(reply["error"])


def test_an_expired_result_is_410_and_its_request_is_not_run_again(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    monkeypatch.setattr(futures, "_DELIVERED_BYTES_MAX", 0)
    trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result()
    trainer.optim_step(types.AdamParams(learning_rate=0.1)).result()
    before = trainer.forward([ce_datum(TEXT)], "cross_entropy").result().metrics
    trainer.forward([ce_datum(TEXT)], "cross_entropy").result()  # only the last answer is kept
    assert post(server, "retrieve_future", {"request_id": f"{trainer.model_id}#3"})[0] == 410
    assert post(server, "retrieve_future", {"request_id": f"{trainer.model_id}#99"})[0] == 404
    again = {"model_id": trainer.model_id, "seq_id": 3, "adam_params": {"learning_rate": 0.1}}
    assert post(server, "optim_step", again)[0] == 410
    assert trainer.forward([ce_datum(TEXT)], "cross_entropy").result().metrics == before
    # A sample is asked for anew by the SDK, whose answers to the first two questions are lost here.
    lose = 2
    ask = Service.promise

    def losing(service: Service, request_id: str) -> futures.Promise:
        nonlocal lose
        if ":sample:" in request_id and lose:
            lose -= 1
            raise futures.GoneError("lost")
        return ask(service, request_id)

    expected = sampler.sample(prompt(*TEXT), 1, ONE).result().sequences[0].tokens
    monkeypatch.setattr(Service, "promise", losing)
    assert sampler.sample(prompt(*TEXT), 1, ONE).result().sequences[0].tokens == expected
    assert lose == 0


def test_a_cancelled_sample_leaves_the_batch_and_its_neighbours_alone(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = client.create_sampling_client(base_model="qwen3").result()
    long = types.SamplingParams(max_tokens=900, seed=3, stop=[])
    short = types.SamplingParams(max_tokens=150, seed=4, stop=[])
    expected = sampler.sample(prompt(*TEXT), 2, short).result().sequences
    running, cancelled, step = threading.Event(), threading.Event(), Decoder.step

    def step_until_all_run(decoder: Decoder, *, others: Sequence[Decoder] = ()) -> None:
        step(decoder, others=others)
        if decoder.running_count == 7 and decoder.drawn_tokens >= 70:
            running.set()
            assert cancelled.wait(HANG_S)

    monkeypatch.setattr(Decoder, "step", step_until_all_run)
    with busy_worker(server):
        abandoned, completed = sampler.sample(prompt(*TEXT), 5, long), sampler.sample(prompt(*TEXT), 2, short)
        wait_for_jobs(server, 2)
    assert running.wait(HANG_S)
    abandoned.future().cancel()
    runtime = service_of(server)._runtime  # pyright: ignore[reportPrivateUsage] as above
    served = runtime._samplers._served  # pyright: ignore[reportPrivateUsage] as above
    wait_until(lambda: any(promise.done for weights in served.values() for promise in weights.tickets))
    cancelled.set()
    for sequence, alone in zip(completed.result().sequences, expected, strict=True):
        assert sequence.tokens == alone.tokens
        np.testing.assert_array_equal(sequence.logprobs_np, alone.logprobs_np)
    settle(server)
    assert not any(weights.tickets or weights.decoder.busy for weights in served.values())


def test_only_samples_can_be_cancelled(server: EngineServer, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    assert post(server, "cancel_future", {"request_id": f"{trainer.model_id}#1"})[0] == 400
    assert post(server, "cancel_future", {"request_id": "nobody:sample:0#1"})[0] == 404
    sampler = trainer.save_weights_and_get_sampling_client().result()
    sampler.sample(prompt(*TEXT), 1, ONE).result()
    sampler_id = f"{trainer.model_id.partition(':')[0]}:sample:0"
    assert post(server, "cancel_future", {"request_id": f"{sampler_id}#0"})[0] == 204
    assert post(server, "cancel_future", {"request_id": f"{sampler_id}#0"})[0] == 204
    assert post(server, "retrieve_future", {"request_id": f"{sampler_id}#0"})[0] == 410


def test_in_flight_clients_share_the_newest_weights_and_snapshots_do_not_change(
    server: EngineServer, client: tinker.ServiceClient
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=1).result()

    def step() -> None:
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()

    def score(sampler: tinker.SamplingClient) -> list[float | None]:
        return sampler.compute_logprobs(prompt(*TEXT)).result()

    step()
    first = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    fixed = trainer.save_weights_and_get_sampling_client().result()
    old = score(fixed)
    assert score(first) == old
    step()
    assert score(first) == old  # until it is published
    second = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    new = score(trainer.save_weights_and_get_sampling_client().result())
    assert new != old
    assert score(first) == score(second) == new
    assert score(fixed) == old
    snapshots = service_of(server)._runtime._snapshots  # pyright: ignore[reportPrivateUsage] as above
    inflight_names = [name for name in snapshots._recent if ":inflight:" in name]  # pyright: ignore[reportPrivateUsage] as above
    assert len([name for name in inflight_names if name.startswith(trainer.model_id)]) == 1
    reply = post(server, "save_weights_for_sampler", {"model_id": trainer.model_id, "kind": "frozen"})
    assert reply[0] == 422


def test_running_samples_outlive_an_in_flight_save(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=1).result()
    sampler = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    futures = [sampler.sample(prompt(*TEXT, i), 2, types.SamplingParams(max_tokens=60, stop=[])) for i in range(4)]
    for _ in range(3):
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.05))
        trainer.save_weights_and_get_sampling_client(kind="inflight").result()
        futures.append(sampler.sample(prompt(*TEXT), 2, ONE))
    assert [len(s.tokens) for f in futures for s in f.result().sequences] == [60] * 8 + [3] * 6


def test_a_compressed_body_is_read_and_a_bomb_is_rejected(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compressing(*_: object) -> types.ClientConfigResponse:
        return types.ClientConfigResponse(proto_compress_fwdbwd=True)

    sizes: list[int] = []
    unpack = http_requests.unpack_body

    def unpack_body(body: bytearray, *, bytes_max: int) -> bytes:
        sizes.append(len(body))
        return unpack(body, bytes_max=bytes_max)

    monkeypatch.setattr(http_requests, "unpack_body", unpack_body)
    losses: list[float] = []
    for _ in range(2):
        with connect(server) as client:
            trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
            losses.append(trainer.forward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"])
        monkeypatch.setattr(InternalClientHolder, "_fetch_client_config", compressing)
    assert losses[0] == losses[1]
    assert len(sizes) == 1
    body = zstandard.compress(pb.ForwardBackwardRequest(model_id="nobody:train:0", seq_id=1).SerializeToString())
    encoded = {"Content-Encoding": "zstd"}
    assert post(server, "forward_backward", body, **encoded)[0] == 404
    assert post(server, "forward_backward", body[:-1], **encoded)[0] == 400
    assert post(server, "forward_backward", body * 2, **encoded)[0] == 400
    assert post(server, "forward_backward", b"not zstd", **encoded)[0] == 400
    assert post(server, "forward_backward", zstandard.compress(bytes(65 << 20)), **encoded)[0] == 413
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(65 << 20))
    assert post(server, "forward_backward", unsized, **encoded)[0] == 413
    assert post(server, "forward_backward", body, **{"Content-Encoding": "br"})[0] == 415


def encoded(**inputs: types.TensorData) -> list[pb.Datum]:
    datum = types.Datum(model_input=prompt(*TEXT), loss_fn_inputs=inputs)
    data = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=data, model_id="m", seq_id=1)
    return list(forward_backward_request_to_proto(request).data)


def test_sparse_and_two_dimensional_tensors_become_dense_arrays() -> None:
    targets = torch.zeros(5, 20, dtype=torch.int64)
    targets[[0, 0, 2, 4], [3, 19, 0, 7]] = torch.tensor([5, 6, 7, 8])
    weights = torch.where(targets > 0, 0.5, 0.0)
    for make in (types.TensorData.from_torch, lambda t: types.TensorData.from_torch_sparse(t, pad_value=0)):
        data = encoded(target_tokens=make(targets), weights=make(weights))
        (example,) = wire_format.decode_examples(data)
        np.testing.assert_array_equal(example.targets, targets.numpy())
        np.testing.assert_array_equal(example.inputs["weights"], weights.numpy())
        assert example.targets.dtype == np.int64


def test_a_malformed_tensor_is_rejected_by_its_field() -> None:
    def broken(change: Callable[[pb.Tensor], object]) -> list[pb.Datum]:
        sparse = types.TensorData.from_torch_sparse(torch.tensor([[1, 0, 0, 0, 0, 0], [2, 3, 0, 0, 0, 0]]), pad_value=0)
        data = encoded(target_tokens=sparse)
        change(data[0].loss_fn_inputs["target_tokens"])
        return data

    def rows(*starts: int) -> Callable[[pb.Tensor], object]:
        return lambda t: setattr(t.sparse_csr, "crow_indices", np.array(starts, np.int64).tobytes())

    def columns(*indices: int) -> Callable[[pb.Tensor], object]:
        return lambda t: setattr(t.sparse_csr, "col_indices", np.array(indices, np.int64).tobytes())

    cases = {
        "crow_indices": [rows(0, 1), rows(0, 4, 3), rows(1, 1, 3), rows(0, 1, 2), rows(0, 1, 2**62), rows()],
        "col_indices": [columns(0, 1, 6), columns(0, -1, 1), columns(0, 1), columns(0, 2**62, 1)],
        "shape": [lambda t: t.shape.pop(), lambda t: t.shape.extend([1]), lambda t: t.shape.__setitem__(0, -2)],
        "sparse tensors": [lambda t: t.shape.__setitem__(1, 1 << 40)],
        "bytes": [lambda t: setattr(t.sparse_csr, "values", b"12345")],
        "dtype": [lambda t: setattr(t, "dtype", pb.DTYPE_BFLOAT16)],
    }
    for field, changes in cases.items():
        for change in changes:
            with pytest.raises(UsageError, match=field):
                wire_format.decode_examples(broken(change))
    dense = encoded(target_tokens=types.TensorData(data=[1, 2, 3, 4], dtype="int64"))
    dense[0].loss_fn_inputs["target_tokens"].shape[:] = [2, 3]
    with pytest.raises(UsageError, match="shape"):
        wire_format.decode_examples(dense)


def test_sequence_ids_are_unique_in_a_session(client: tinker.ServiceClient) -> None:
    samplers = [client.create_sampling_client(base_model="llama").result() for _ in range(2)]
    futures = [sampler.sample(prompt(*TEXT), 3, ONE) for sampler in samplers for _ in range(2)]
    ids = [sequence.sequence_id for future in futures for sequence in future.result().sequences]
    assert len(set(ids)) == 12
    assert None not in ids


def test_a_sampling_request_that_is_sent_twice_runs_once(server: EngineServer, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    body = {"session_id": trainer.model_id.partition(":")[0], "sampling_session_seq_id": 5, "base_model": "llama"}
    _, reply = post(server, "create_sampling_session", body)
    assert post(server, "create_sampling_session", body) == (200, reply)
    assert post(server, "create_sampling_session", body | {"base_model": "qwen3"})[0] == 400
    sample_body = {
        "sampling_session_id": reply["sampling_session_id"],
        "seq_id": 1,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT}]},
        "sampling_params": {"max_tokens": 2},
    }
    first = post(server, "asample", sample_body)
    assert post(server, "asample", sample_body) == first
    assert post(server, "asample", sample_body | {"num_samples": 3})[0] == 400


def test_a_gap_in_the_request_order_is_bounded(server: EngineServer, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    for seq_id, status in ((5000, 400), (2**63, 400), (0, 400), (-1, 400), (4096, 200)):
        body = {"model_id": trainer.model_id, "seq_id": seq_id, "adam_params": {}}
        assert post(server, "optim_step", body)[0] == status


def test_early_requests_of_a_session_are_limited_in_bytes(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id, other_model_id = (
        client.create_lora_training_client("llama", rank=2, seed=0).result().model_id for _ in "ab"
    )
    data = types.ForwardBackwardInput(data=[ce_datum(TEXT)] * 50, loss_fn="cross_entropy")

    def send(model_id: str, seq_id: int) -> int:
        request = types.ForwardBackwardRequest(forward_backward_input=data, model_id=model_id, seq_id=seq_id)
        return post(server, "forward_backward", forward_backward_request_to_proto(request).SerializeToString())[0]

    size_bytes = sum(
        datum.ByteSize()
        for datum in forward_backward_request_to_proto(
            types.ForwardBackwardRequest(forward_backward_input=data, model_id=model_id, seq_id=1)
        ).data
    )
    monkeypatch.setattr(request_order, "_MAX_EARLY_BYTES", 3 * size_bytes)
    assert {
        send(*early)
        for early in ((model_id, 2), (model_id, 3), (other_model_id, 2), (model_id, 4), (model_id, 3), (model_id, 4))
    } == {200}
    assert send(model_id, 1) == 200  # its turn has come, and so has that of those behind it
    assert send(model_id, 6) == 200
    assert send(model_id, 5) == 200
    ids = [f"{model_id}#{seq_id}" for seq_id in range(1, 7)]
    errors = [post(server, "retrieve_future", {"request_id": request_id})[1].get("error") for request_id in ids]
    assert [error is None for error in errors] == [True, True, True, False, True, True]
    assert "wait for earlier ones" in str(errors[3])


def test_unfetched_results_of_a_session_are_limited_in_bytes(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = client.create_lora_training_client("llama", rank=2, seed=0).result().model_id
    two = 2 * futures._OVERHEAD_BYTES + 300  # pyright: ignore[reportPrivateUsage] what a promise takes up counts too
    monkeypatch.setattr(futures, "_UNFETCHED_BYTES_MAX", two)

    def step(seq_id: int) -> None:
        assert post(server, "optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})[0] == 200

    def answer(seq_id: int) -> str:
        return str(post(server, "retrieve_future", {"request_id": f"{model_id}#{seq_id}"})[1])

    for seq_id in range(1, 6):
        step(seq_id)
    settle(server)
    with connect(server) as stranger:  # who has room of its own
        stranger.create_lora_training_client("llama", rank=2, seed=0).result()
    answers = [answer(seq_id) for seq_id in range(1, 6)]
    assert ["error" in text for text in answers] == [False, False, True, True, True]
    assert "fetch the finished answers first" in answers[-1]
    step(6)
    assert "error" not in answer(6)


def test_repeated_polling_leaves_nothing(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_LONG_POLL_S", 0.01)
    service = service_of(server)
    name = f"{on_server(server, service.sessions.open).session_id}:never"
    promise, _ = on_server(server, lambda: service.promises.get_or_make(name))
    for _ in range(5):
        assert post(server, "retrieve_future", {"request_id": name})[0] == 408
    assert not promise._wakers  # pyright: ignore[reportPrivateUsage] as above
    assert not promise._future._done_callbacks  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportAttributeAccessIssue] as above


def test_an_unreadable_request_fails_in_its_turn(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    bad = trainer.optim_step(types.AdamParams(learning_rate=float("nan")))  # the client sends null
    good = trainer.forward([ce_datum(TEXT)], "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
        bad.result()
    assert good.result().metrics["loss:sum"] > 0
    model = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result().model_id
    data = types.ForwardBackwardInput(data=[ce_datum(TEXT)] * 50, loss_fn="cross_entropy")
    body = [
        forward_backward_request_to_proto(
            types.ForwardBackwardRequest(forward_backward_input=data, model_id=model, seq_id=seq_id)
        ).SerializeToString()
        for seq_id in (1, 2, 3)
    ]
    assert post(server, "forward_backward", body[2])[0] == 200
    assert post(server, "forward_backward", body[0][:-5])[0] == 200
    with monkeypatch.context() as patch:
        patch.setattr(http_requests, "_BODY_BYTES_MAX", 100)
        assert post(server, "forward_backward", body[1])[0] == 200
    errors = [post(server, "retrieve_future", {"request_id": f"{model}#{i}"})[1].get("error") for i in (1, 2, 3)]
    assert "protobuf" in str(errors[0])
    assert "larger than 100 bytes" in str(errors[1])
    assert errors[2] is None


def test_a_large_result_is_announced_first(
    server: EngineServer, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    expected = trainer.forward([ce_datum(TEXT)], "cross_entropy").result()
    monkeypatch.setattr(routes, "_INLINE_BYTES_MAX", 10)
    sample_body = {"request_id": f"{trainer.model_id}#1", "allow_metadata_only": True}
    status, reply = post(server, "retrieve_future", sample_body)
    assert (status, reply["status"]) == (200, "complete_metadata")
    assert int(str(reply["response_payload_size"])) > 10
    assert trainer.forward([ce_datum(TEXT)], "cross_entropy").result().metrics == expected.metrics


def test_unsupported_losses_are_rejected_with_an_alternative(
    server: EngineServer, client: tinker.ServiceClient
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    with pytest.raises(tinker.RequestFailedError, match=r"stable_reinforce.*use importance_sampling"):
        trainer.forward_backward([ce_datum(TEXT)], "stable_reinforce").result()
    with pytest.raises(tinker.RequestFailedError, match=r"custom.*forward_backward_custom"):
        trainer.forward_backward([ce_datum(TEXT)], "custom").result()
    status, reply = post(server, "create_custom_loss", {"session_id": "any"})
    assert status == 400
    assert "forward_backward_custom" in str(reply["detail"])


@pytest.mark.parametrize("token", [2**63, -(2**64), 2**200, 1e30])
def test_a_token_that_is_no_64_bit_integer_is_a_client_error(
    server: EngineServer, client: tinker.ServiceClient, token: float
) -> None:
    sampler = client.create_sampling_client(base_model="llama").result()
    session_id = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result().model_id.split(":")[0]
    body = {"session_id": session_id, "sampling_session_seq_id": 6, "base_model": "llama"}
    _, reply = post(server, "create_sampling_session", body)
    sample_body = {
        "sampling_session_id": reply["sampling_session_id"],
        "seq_id": 1,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, token]}]},
        "sampling_params": {"max_tokens": 2},
    }
    status, reply = post(server, "asample", sample_body)
    if status == 200:
        _, reply = post(server, "retrieve_future", {"request_id": reply["request_id"]})
        assert reply["category"] == "user", reply
    else:
        assert 400 <= status < 500
    assert sampler.sample(prompt(*TEXT), 1, ONE).result().sequences


def test_waiting_requests_of_an_unloaded_model_are_answered(server: EngineServer, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    early = f"{trainer.model_id}#2"
    body = {"model_id": trainer.model_id, "adam_params": {}}
    assert post(server, "optim_step", body | {"seq_id": 2})[0] == 200
    assert post(server, "unload_model", {"model_id": trainer.model_id})[0] == 200
    _, reply = post(server, "retrieve_future", {"request_id": early})
    assert reply == {"error": "the model was unloaded before this request was due", "category": "user"}
    assert post(server, "optim_step", body | {"seq_id": 1})[0] == 404


def test_the_number_of_an_unloaded_model_is_not_reused(server: EngineServer, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    path = trainer.save_state("kept").result().path
    session_id, _, number = trainer.model_id.split(":")
    assert post(server, "unload_model", {"model_id": trainer.model_id})[0] == 200
    again = {"session_id": session_id, "model_seq_id": int(number)}
    assert post(server, "create_model", again | {"base_model": "llama", "lora_config": {"rank": 2}})[0] == 410
    assert post(server, "load_weights", again | {"path": path, "optimizer": False})[0] == 410


def test_a_model_with_an_expired_creation_request_is_not_created_again(
    server: EngineServer, client: tinker.ServiceClient
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=2, seed=0).result()
    before = trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"]
    trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    session_id, _, number = trainer.model_id.split(":")
    on_server(server, lambda: service_of(server).promises.forget(f"{trainer.model_id}#create"))
    create = {"session_id": session_id, "base_model": "llama", "lora_config": {"rank": 2, "seed": 0}}
    assert post(server, "create_model", create | {"model_seq_id": int(number)})[0] == 410
    assert trainer.forward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"] < before
