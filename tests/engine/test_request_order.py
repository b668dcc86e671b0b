"""Limits on requests that wait for their turn and on delivered results, and the fate of the rest."""

from __future__ import annotations

import errno
import os

import pytest
import tinker

from rlkit.engine import EngineServer
from rlkit.engine.server import request_order
from rlkit.engine.server.futures import Promise
from tests.limits import HANG_S

from .conformance import ask, new_trainer, open_model, open_session, train_request
from .helpers import ce_datum
from .test_sessions import busy_worker

TEXT = [72, 101, 108, 108, 111]


def test_a_call_that_is_too_large_fails_and_the_next_call_runs(
    client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = new_trainer(client)
    monkeypatch.setattr(request_order, "_MAX_EARLY_BYTES", 100_000)
    data = [ce_datum([1, 2, 3])] * 4000  # sent in four parts, the first of them last
    with pytest.raises(tinker.RequestFailedError, match="send less per call"):
        trainer.forward(data, "cross_entropy").result(timeout=HANG_S)
    assert trainer.forward([ce_datum(TEXT)], "cross_entropy").result(timeout=HANG_S).metrics["loss:sum"] > 0


def test_waiting_requests_are_limited_in_bytes(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    model_id = open_model(server, open_session(server))
    monkeypatch.setattr(request_order, "_MAX_QUEUED_BYTES", 2 * len(train_request(model_id, 1)))

    def send(seq_id: int) -> None:
        body = train_request(model_id, seq_id)
        assert ask(server, "forward_backward", body, media_type="application/x-protobuf").status == 200

    def is_refused(seq_id: int) -> bool:
        answer = ask(server, "retrieve_future", {"request_id": f"{model_id}#{seq_id}"})
        return b"wait for their results first" in answer.body

    with busy_worker(server):
        for seq_id in (1, 2, 3, 3, 4):
            send(seq_id)
    assert [is_refused(seq_id) for seq_id in (1, 2, 3, 4)] == [False, False, True, True]
    send(5)  # those before it have run
    assert not is_refused(5)


@pytest.mark.parametrize(("number", "traced"), [(errno.ENOSPC, False), (errno.EDQUOT, False), (errno.EIO, True)])
def test_a_full_disk_is_logged_in_one_line(number: int, traced: bool, caplog: pytest.LogCaptureFixture) -> None:
    promise = Promise("request-1")
    request_order._fail(promise, OSError(number, os.strerror(number)))
    (record,) = caplog.records
    assert bool(record.exc_info) == traced
    assert promise.done and "request-1" in record.message
