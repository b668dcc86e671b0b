"""A model is measured with the patience that a run has."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rlkit.config.schema import Config
from rlkit.errors import ServiceError
from rlkit.evaluation import evaluate
from rlkit.testing import ByteChat, Fault, SimulatedTinker, World, run_virtual

TASKS = """
import rlkit

class Letters(rlkit.SingleTurnEnv):
    def __init__(self, number): self.task_id = f"task-{number}"
    def prompt(self): return self.task_id
    def grade(self, reply): return float(reply.text.count("e"))

def tasks(): return [Letters(number) for number in range(5)]
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "letters.py").write_text(TASKS)
    spec = {"env": f"{tmp_path}/letters.py:tasks"}
    return Config(model="simulated", envs={"letters": spec}, service={"timeout_s": 600.0, "base_url": "http://x"})  # type: ignore[arg-type]  pydantic makes sections of them


def measured(
    config: Config, service: SimulatedTinker, monkeypatch: pytest.MonkeyPatch
) -> tuple[Mapping[str, float], list[str]]:
    notes = list[str]()

    @asynccontextmanager
    async def connect(*args: object, **named: object) -> AsyncGenerator[SimulatedTinker]:
        yield service

    monkeypatch.setattr("rlkit.evaluation.connect", connect)
    monkeypatch.setattr("rlkit.evaluation.load_chat", lambda *args: ByteChat())
    return run_virtual(evaluate(config, note=notes.append)), notes


@pytest.mark.parametrize("kind", ["500", "429", "hang"])
def test_a_request_that_fails_is_made_again_and_the_user_is_told(
    config: Config, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = measured(config, SimulatedTinker(), monkeypatch)
    world = World(faults=[Fault(kind, call="sample", at=2)])  # type: ignore[arg-type]  one of the kinds
    metrics, notes = measured(config, SimulatedTinker(world=world), monkeypatch)
    assert metrics == expected
    assert metrics["eval/letters/episodes"] == 5
    assert notes


def test_a_service_that_is_gone_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SimulatedTinker(world=World(faults=[Fault("500", call="sample")]))
    with pytest.raises(ServiceError, match="InternalServerError"):
        measured(config, service, monkeypatch)
    assert service.world.calls["sample"] > 50


def test_what_is_asked_for_before_the_first_rollout_is_asked_again_too(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(SimulatedTinker):
        asked = 0

        async def context_tokens(self, model: str) -> int | None:
            self.asked += 1
            if self.asked == 1:
                raise ServiceError("busy")
            return await super().context_tokens(model)

    _, notes = measured(config, Forgetful(), monkeypatch)
    assert notes == ["busy; trying again"]
