"""Harbor's verifier, sealed from the agent."""

from __future__ import annotations

from typing import override

from harbor.models.task.config import VerifierEnvironmentMode
from harbor.models.task.verifier_mode import (
    resolve_step_verifier_mode,
    resolve_task_verifier_mode,
    resolve_verifier_environment_definition,
)
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import Verifier

from rlkit.envs.harbor.verification.sealing import TestedWork, restore_logs, sealed


class SealedVerifier(Verifier):
    """A verifier that seals the environment shared with the agent, and reads the reward from it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # pyright: ignore[reportArgumentType]  Harbor's arguments, passed through
        config = self.task.config
        step = next((step for step in config.steps or () if step.name == self.step_name), None)
        mode = resolve_task_verifier_mode(config) if step is None else resolve_step_verifier_mode(config, step)
        self._is_shared = mode == VerifierEnvironmentMode.SHARED
        if not self._is_shared:
            definition = resolve_verifier_environment_definition(config, self.task.paths, step)
            self._skip_tests_upload = definition is not None and definition.bundled_tests

    @override
    async def verify(self) -> VerifierResult:
        if not self._is_shared:
            return await super().verify()
        if not self.environment.capabilities.mounted:
            for path in (self.trial_paths.reward_json_path, self.trial_paths.reward_text_path):
                path.unlink(missing_ok=True)
        work = TestedWork.of(self.task.config.metadata)
        steps = self.task.config.steps
        is_last = not steps or steps[-1].name == self.step_name
        async with sealed(self.environment, work, user=self.environment.default_user, is_last=is_last):
            await restore_logs(self.environment, self.trial_paths.agent_dir)
            return await super().verify()
