from __future__ import annotations

from pathlib import Path

import pytest

from rlkit.config.schema import ServiceConfig
from rlkit.errors import ConfigError
from rlkit.tinker_client.connect import choose_service, find_credential


@pytest.fixture(autouse=True)
def _empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def test_engine_is_selected_without_credential_and_address() -> None:
    choice = choose_service(ServiceConfig(), environ={})
    assert (choice.kind, choice.base_url) == ("engine", None)
    assert choice.reason == "there is neither a Tinker credential nor TINKER_BASE_URL"


def test_credential_selects_the_hosted_service() -> None:
    assert choose_service(ServiceConfig(), environ={"TINKER_API_KEY": "tml-secret"}).kind == "hosted"
    assert "tml-secret" not in str(choose_service(ServiceConfig(), environ={"TINKER_API_KEY": "tml-secret"}))


def test_address_precedes_credential_and_configuration_precedes_environment() -> None:
    environ = {"TINKER_API_KEY": "tml-x", "TINKER_BASE_URL": "http://a"}
    assert choose_service(ServiceConfig(), environ=environ).base_url == "http://a"
    assert choose_service(ServiceConfig(base_url="http://b"), environ=environ).base_url == "http://b"


def test_a_stored_login_counts_as_a_credential(tmp_path: Path) -> None:
    assert find_credential(environ={}) is None
    (tmp_path / ".tinker").mkdir()
    (tmp_path / ".tinker" / "credentials.json").write_text("{}")
    assert find_credential(environ={}) == str(tmp_path / ".tinker" / "credentials.json")


@pytest.mark.parametrize("environ", [{"TINKER_BASE_URL": "http://a"}, {"TINKER_API_KEY": "tml-secret"}])
@pytest.mark.parametrize("name", ["engine_threads", "engine_device"])
def test_engine_settings_without_the_engine_are_an_error(name: str, environ: dict[str, str]) -> None:
    config = ServiceConfig.model_validate({name: "cpu" if name == "engine_device" else 2})
    with pytest.raises(
        ConfigError, match=rf"service\.{name} has no effect: {next(iter(environ))} is set, so the embedded"
    ):
        choose_service(config, environ=environ)
    assert choose_service(config, environ={}).kind == "engine"
