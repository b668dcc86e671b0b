"""Verdicts of real trials."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlkit.envs.harbor.phases import Gates, PhaseLimits
from rlkit.envs.harbor.settings import make_environment
from rlkit.envs.harbor.trial import make_environment_fields, play_trial


async def trial_verdict(
    task: Path, *, agent: Mapping[str, object], place: str = "local", trials_dir: Path | None = None
) -> object:
    """Play a trial; return the rewards of its verifier, or the name of the exception that ended it."""

    def read_verdict(result: object, gate_pass: object, folder: object) -> object:
        error = result.exception_info  # type: ignore[attr-defined]  Harbor's TrialResult
        return error.exception_type if error else result.verifier_result.rewards  # type: ignore[attr-defined]

    def make(folder: Path) -> dict[str, object]:
        return {
            "task": {"path": str(task)},
            "trials_dir": str(folder),
            "agent": dict(agent),
            "environment": make_environment_fields(make_environment(place)),
        }

    gates = Gates(PhaseLimits(starting=1, verifying=1))
    return await play_trial(make, read_verdict, gates=gates, trials_dir=trials_dir, keep=lambda verdict: False)  # type: ignore[arg-type]
