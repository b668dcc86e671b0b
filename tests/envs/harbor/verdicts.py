"""Verdicts of real trials."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlkit.envs.harbor.phases import GatePass, Gates, PhaseLimits
from rlkit.envs.harbor.settings import make_environment
from rlkit.envs.harbor.trial import play_trial


async def trial_verdict(
    task: Path, *, agent: Mapping[str, object], place: str = "local", trials_dir: Path | None = None
) -> object:
    """Play a trial; return the rewards of its verifier, or the name of the exception that ended it."""

    def read_verdict(result: object, folder: object) -> object:
        error = result.exception_info  # type: ignore[attr-defined]  Harbor's TrialResult
        return error.exception_type if error else result.verifier_result.rewards  # type: ignore[attr-defined]

    return await play_trial(
        task,
        make_environment(place),
        read_verdict,
        fields={"agent": dict(agent)},  # type: ignore[dict-item]  JSON
        gate_pass=GatePass(Gates(PhaseLimits(starting=1, verifying=1))),
        trials_dir=trials_dir,
    )
