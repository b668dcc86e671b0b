"""The agent that Harbor's own command line runs, with a model of a real service: the embedded engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlkit.engine import EngineServer
from rlkit.errors import UsageError

from .playing import reward, write_simple

pytestmark = [
    pytest.mark.usefixtures("can_sandbox"),
    pytest.mark.filterwarnings("ignore:Task.checksum will be deprecated:DeprecationWarning"),  # by Harbor's own trial
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with EngineServer(threads=1, root=tmp_path_factory.mktemp("engine")) as server:
        yield server


async def trial(task: Path, model: str | None, **kwargs: object):
    from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=task.parent / "trials",
        agent=AgentConfig(
            name="rlkit.envs.harbor.standalone:TinkerTerminus2", model_name=model, kwargs={"max_turns": 1, **kwargs}
        ),
        environment=EnvironmentConfig(import_path="rlkit.envs.harbor.sandbox:LocalSandbox"),
    )
    return await (await Trial.create(config)).run()


@pytest.mark.slow
def test_trials_of_one_model_share_a_connection(
    cache: Path, tmp_path: Path, engine: EngineServer, byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlkit.envs.harbor import standalone

    monkeypatch.setenv("TINKER_API_KEY", engine.api_key)
    task = write_simple(tmp_path / "task")
    connections: list[object] = []
    connect = standalone.connect
    monkeypatch.setattr(
        standalone, "connect", lambda *args, **kwargs: connections.append(args) or connect(*args, **kwargs)
    )

    async def main() -> None:
        options = {"base_url": engine.url, "max_tokens": 8}
        results = await asyncio.gather(*(trial(task, str(byte_model_dir), **options) for _ in range(2)))
        assert [(result.exception_info, reward(result)) for result in results] == [(None, 0.0)] * 2
        for result in results:
            assert result.agent_result.metadata["end"] == "max_turns"
            assert result.agent_result.n_output_tokens <= 8
            assert result.agent_info.model_info.name in str(byte_model_dir)

    asyncio.run(main())
    assert len(connections) == 1


def test_a_checkpoint_that_is_not_there_is_an_error_and_no_reward(
    cache: Path, tmp_path: Path, engine: EngineServer, byte_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", engine.api_key)
    task = write_simple(tmp_path / "task")
    options = {"base_url": engine.url, "checkpoint_path": "tinker://nothing/sampler_weights/000001"}
    result = asyncio.run(trial(task, str(byte_model_dir), **options))
    assert "tinker://nothing" in result.exception_info.exception_message
    assert result.verifier_result is None


def test_a_model_or_a_checkpoint_is_required(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give a model"):
        asyncio.run(trial(write_simple(tmp_path / "task"), None))
