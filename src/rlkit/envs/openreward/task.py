"""Tasks of an environment of the Open Reward Standard.

Invariant: each rollout has its own session. A session that fails before the model's first reply is replaced by a new
session. If it fails later, the episode fails and the rollout is retried from the beginning.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from rlkit.env import Env
from rlkit.envs.openreward.admission import Gate, gate
from rlkit.envs.openreward.connection.clients import environment
from rlkit.envs.openreward.connection.faults import SessionLost
from rlkit.envs.openreward.connection.servers import LocalServer
from rlkit.envs.openreward.episode import play
from rlkit.envs.openreward.session import Session
from rlkit.envs.openreward.settings import Settings
from rlkit.errors import EnvironmentFault, UsageError
from rlkit.policy import Policy
from rlkit.rollout.recorder import RecordingPolicy
from rlkit.types import Episode, Json, Outcome

if TYPE_CHECKING:
    from openreward.api.environments.client import AsyncEnvironment


@dataclass(frozen=True)
class OpenRewardTask(Env):
    """Task identified by its split and index.

    A local server is not pickled, because it belongs to the process that started it.
    """

    split: str
    index: int
    settings: Settings
    server: LocalServer | None = field(default=None, repr=False, compare=False)

    stochastic: ClassVar[bool] = True
    max_reward = float("inf")

    @property
    def task_id(self) -> str:
        """Environment, split and index."""
        return f"{self.settings.access.target.label}/{self.split}/{self.index}"

    async def rollout(self, policy: Policy) -> Outcome:
        """Play one session.

        Raises:
            EnvironmentFault: the environment failed, or the session was lost.
            UsageError: the environment cannot be played as configured, or its local server has ended.
        """
        settings = self.settings
        outcome = await self._in_session(lambda session: play(session, policy, settings), lambda: _has_begun(policy))
        target = settings.access.target
        record: dict[str, Json] = {
            "target": target.name,
            "hosted": target.base_url is None,
            "variant": target.variant,
            "split": self.split,
            "index": self.index,
        }
        return replace(outcome, info={**outcome.info, "openreward": record})

    async def score_group(self, episodes: Sequence[Episode]) -> Sequence[float] | None:
        """Return the rewards of a group's episodes if the environment compares them; None if it does not."""
        settings = self.settings
        if not all(episode.info.get("compared") for episode in episodes):
            return None
        scores = await self._in_session(lambda session: session.scores(episodes), lambda: False)
        rewards = [0.0 if settings.group_score == "replace" else episode.reward or 0.0 for episode in episodes]
        return [settings.reward.clip(reward + score) for reward, score in zip(rewards, scores, strict=True)]

    async def _in_session[T](self, use: Callable[[Session], Awaitable[T]], is_final: Callable[[], bool]) -> T:
        """Use a new session; if it is lost, replace it unless `is_final` returns True."""
        settings = self.settings
        env = await environment(settings.access)
        session_gate = gate(settings.access, settings.max_sessions)
        for attempts_left in reversed(range(settings.openings)):
            await session_gate.pause()
            try:
                async with session_gate.admitted():
                    return await self._use_session(env, session_gate, use)
            except SessionLost as lost:
                if self.server is not None:
                    self.server.check()
                session_gate.refused() if lost.busy else session_gate.failed()
                if not attempts_left or is_final():
                    raise EnvironmentFault(f"the session was lost: {lost}") from lost
        raise AssertionError("the last session returns or raises")

    async def _use_session[T](
        self, env: AsyncEnvironment, session_gate: Gate, use: Callable[[Session], Awaitable[T]]
    ) -> T:
        settings, name = self.settings, self.settings.access.target.label
        clean = settings.secrets.cleaner(settings.access.key)
        try:
            raw = env.session(
                split=self.split,
                index=self.index,
                secrets=settings.secrets.sent() or None,
                toolset=settings.toolset,  # pyright: ignore[reportArgumentType]  checked by the SDK
            )
        except ValueError as error:
            raise UsageError(f"{name}: {clean(str(error))}") from error
        session = Session(raw, session_gate, settings.time, name, clean)
        async with session.open():
            await self._check_version(session)
            session_gate.opened()
            return await use(session)

    async def _check_version(self, session: Session) -> None:
        target = self.settings.access.target
        if target.version is None:
            return
        runs = await session.version()
        versions = [version for version in (runs.get("build_sha"), runs.get("version")) if version]
        if not any(version.startswith(target.version) for version in versions):
            raise UsageError(
                f"target: {target.label} has version {' or '.join(versions) or 'unknown'}, not "
                f"{target.version}: change the version in target, or leave it out"
            )


def _has_begun(policy: Policy) -> bool:
    """Return whether the model has replied, which cannot be undone; True for a policy that does not record turns."""
    return not isinstance(policy, RecordingPolicy) or bool(policy.turns)
