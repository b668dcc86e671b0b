"""A pilot says what it measured, and nothing of what it could not."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

import rlkit
from rlkit.config import load_config
from rlkit.cost.estimate import Band, Speed
from rlkit.dry_run.pilot import Pilot, measure_speed, run_pilot
from rlkit.service import Service
from rlkit.testing import ByteChat, Latency, SimulatedTinker, run_virtual
from rlkit.tinker_client.connect import ServiceChoice
from tests.simulation import Word

SERVICE = ServiceChoice("url", "http://127.0.0.1:9", "it is simulated")


def make_speed(
    *, sampled: int = 100, waited_s: float = 10.0, played_s: float = 5.0, trained: int = 200, trained_s: float = 2.0,
    scored: int = 0, is_local: bool = False,
) -> Speed | None:  # fmt: skip
    return measure_speed(
        stream=(sampled, waited_s),
        total=(sampled, played_s),
        trained=(trained, trained_s),
        reference=(scored, 4.0),
        step_s=1.0,
        is_local=is_local,
    )


def test_speed_is_tokens_per_second() -> None:
    measured = make_speed(scored=400, is_local=True)
    assert measured is not None
    assert measured.stream == Band(10 / 1.5, 10 * 1.5)
    assert measured.total == Band(20 / 1.5, 20 * 3)
    assert measured.trained == Band(100 / 1.5, 100 * 1.5)
    assert measured.reference == Band(100 / 1.5, 100 * 1.5)
    assert measured.source == "measured: 20 tokens a second sampled, 100 trained on, 100 by the reference"
    other = make_speed()
    assert other is not None
    assert (other.total, other.reference) == (None, None)


@pytest.mark.parametrize("nothing", ["sampled", "trained"])
def test_pilot_without_samples_or_training_has_no_speed(nothing: str) -> None:
    assert (make_speed(sampled=0) if nothing == "sampled" else make_speed(trained=0)) is None


@pytest.mark.parametrize("instant", ["waited_s", "played_s", "trained_s"])
def test_instant_operation_gives_no_speed(instant: str) -> None:
    assert make_speed(**{instant: 0.0}) is None


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
