"""The hub is asked where the environment says, and never for long."""

from __future__ import annotations

import socket

import pytest

from rlkit.tokenizers.hub import hub_problem

NOWHERE = "http://127.0.0.1:9"


def test_hub_request_follows_the_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        local_url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", local_url)
        assert hub_problem() is None
        monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
        assert "127.0.0.1 cannot be reached" in str(hub_problem())
        monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
        monkeypatch.setenv("http_proxy", local_url)
        assert hub_problem() is None
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        assert hub_problem() == "HF_HUB_OFFLINE is set"


@pytest.mark.parametrize("endpoint", ["http://[bad", "http://h:99999"])
def test_invalid_address_of_the_hub_is_a_reason(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert (hub_problem() or "").startswith("the address of the hub or of its proxy is no URL: ")
