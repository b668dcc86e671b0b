"""Uploads to a stub of Docent's server, through its own client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkit.errors import MissingError
from rlkit.trackers.from_config import load_service
from rlkit.trackers.sync import SendingFailed, send
from tests.trackers.folders import MESSAGES, write_run, write_step
from tests.trackers.stubs import DocentStub, docent_stub


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[DocentStub]:
    pytest.importorskip("docent")
    monkeypatch.setenv("DOCENT_API_KEY", "the-key")
    with docent_stub() as server:
        yield server


def test_each_rollout_is_a_transcript_with_its_origin(stub: DocentStub, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=1, settings={"model": "acme/tiny"})
    write_step(directory, 2, info={"messages": MESSAGES})
    settings = {"url": stub.url, "collection": "sums"}
    assert send(directory, load_service("docent", settings)) == 3
    (collection,) = stub.collections
    assert collection["name"] == "sums"
    assert len(stub.runs) == 8
    assert stub.headers == ["Bearer the-key"] * len(stub.headers)

    labels = stub.runs[0]["metadata"]
    assert labels == {
        **labels,
        "run": "run",
        "model": "acme/tiny",
        "step": 1,
        "environment": "sums",
        "task": "2+2",
        "reward": 1.0,
        "stop_reason": "stop",
        "weights_version": 0,
    }
    messages = stub.runs[0]["transcripts"][0]["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "what is 2+2? "),
        ("assistant", "four"),
    ]
    recorded = stub.runs[4]["transcripts"][0]["messages"]
    assert [message["role"] for message in recorded] == ["system", "user", "assistant", "tool", "assistant"]
    assert recorded[2]["tool_calls"][0]["function"] == "look"

    write_step(directory, 3)
    send(directory, load_service("docent", settings))
    assert len(stub.collections) == 1
    assert [message["metadata"]["step"] for message in stub.runs[8:]] == [3, 3, 3, 3]


def test_configured_number_of_rollouts_is_sent(stub: DocentStub, tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", steps=2)
    send(directory, load_service("docent", {"url": stub.url, "rollouts": 1}))
    assert [run["metadata"]["step"] for run in stub.runs] == [1, 2]


def test_rejected_upload_is_reported_and_not_marked_as_sent(stub: DocentStub, tmp_path: Path) -> None:
    stub.refuse = True
    directory = write_run(tmp_path / "run")
    settings = {"url": stub.url}
    with pytest.raises(SendingFailed, match="docent: opening a run failed"):
        send(directory, load_service("docent", settings), sleep=lambda seconds: None)
    stub.refuse = False
    assert send(directory, load_service("docent", settings)) == 4


def test_missing_key_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docent")
    monkeypatch.delenv("DOCENT_API_KEY", raising=False)
    with pytest.raises(MissingError, match="DOCENT_API_KEY is not set"):
        load_service("docent", {})
