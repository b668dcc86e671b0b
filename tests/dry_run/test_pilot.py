"""A pilot says what it measured, and nothing of what it could not."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

import rlkit
from rlkit.config.loading.load import load_config
from rlkit.cost.estimate import Band, Speed
from rlkit.dry_run.pilot import Pilot, make_speed, run_pilot, tokens_per_second
from rlkit.service import Service
from rlkit.testing import ByteChat, Latency, SimulatedTinker, run_virtual
from rlkit.tinker_client.connect import ServiceChoice
from tests.simulation import Word

SERVICE = ServiceChoice("url", "http://127.0.0.1:9", "it is simulated")


SPEEDS = {"stream": 10.0, "total": 20.0, "trained": 100.0}


def make_service_speed(*, reference: float = 0.0, is_local: bool = False, **speeds: float) -> Speed | None:
    return make_speed(**(SPEEDS | speeds), reference=reference, step_s=1.0, is_local=is_local)


def test_speed_is_tokens_per_second() -> None:
    assert tokens_per_second(100, 5.0) == 20
    measured = make_service_speed(reference=100.0, is_local=True)
    assert measured is not None
    assert measured.stream == Band(10 / 1.5, 10 * 1.5)
    assert measured.total == Band(20 / 1.5, 20 * 3)
    assert measured.trained == Band(100 / 1.5, 100 * 1.5)
    assert measured.reference == Band(100 / 1.5, 100 * 1.5)
    assert measured.source == "measured: 20 tokens a second sampled, 100 trained on, 100 by the reference"
    other = make_service_speed()
    assert other is not None
    assert (other.total, other.reference) == (None, None)


@pytest.mark.parametrize("name", SPEEDS)
@pytest.mark.parametrize(("tokens", "seconds"), [(0, 5.0), (100, 0.0)], ids=["no tokens", "instant"])
def test_pilot_without_a_measurement_has_no_speed(name: str, tokens: int, seconds: float) -> None:
    assert make_service_speed(**{name: tokens_per_second(tokens, seconds)}) is None


def run_word_pilot(monkeypatch: pytest.MonkeyPatch, **more: object) -> Pilot:
    service = SimulatedTinker(latency=Latency())

    def connect(*_: object, **__: object) -> AbstractAsyncContextManager[Service]:
        return service

    monkeypatch.setattr("rlkit.dry_run.pilot.connect", connect)
    config = load_config([], settings={"model": "simulated", "envs": {"words": {}}} | more).config
    tasks: dict[str, list[rlkit.Env]] = {"words": [Word(1), Word(2)]}
    return run_virtual(run_pilot(config, tasks, ByteChat(), SERVICE, groups=2, note=lambda message: None))


def test_the_reference_of_a_penalty_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_word_pilot(monkeypatch)
    penalized = run_word_pilot(monkeypatch, kl_penalty={"coefficient": 0.1})
    assert plain.speed is not None
    assert plain.speed.reference is None
    assert penalized.speed is not None
    assert penalized.speed.reference is not None
    assert penalized.speed.reference.low > 0
    assert "by the reference" in penalized.speed.source
    assert penalized.usage.prefill_tokens > plain.usage.prefill_tokens


def test_pilot_without_data_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    pilot = run_word_pilot(monkeypatch, batch={"max_tokens": 2, "overlong": "drop"})
    assert (pilot.speed, pilot.rollout_count) == (None, 16)
    assert pilot.usage.trained_tokens == 0


def test_step_estimator_gets_all_groups_of_a_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_word_pilot(monkeypatch, advantage="batch_std").speed is not None
