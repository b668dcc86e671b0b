"""`RLTerminus2`: Terminus2 with a policy registered in `rlkit.envs.harbor.agents.policy_registry`."""

from __future__ import annotations

from typing import cast, override

from harbor.llms.base import BaseLLM
from pydantic import Field

from rlkit.envs.harbor.agents.llm import PolicyLLM
from rlkit.envs.harbor.agents.policy_registry import find_registration
from rlkit.envs.harbor.agents.terminus import PolicyOptions, PolicyTerminus2


class _Options(PolicyOptions):
    policy: str = Field(description="Key of a policy that is registered in this process.")


class RLTerminus2(PolicyTerminus2):
    """Terminus2 with a policy of this process; see `PolicyTerminus2` for its options, and `policy`, the key."""

    options_model = _Options

    @override
    def _init_llm(self, *args: object, **kwargs: object) -> BaseLLM:
        options = cast("_Options", self.options)
        registration = find_registration(options.policy)
        self.tallies = registration.tallies
        self._policy_llm = PolicyLLM(
            registration.policy,
            model_name=self._model_name,
            max_tokens=options.max_tokens,
            reserve_tokens=options.reserve_tokens,
            temperature=options.temperature,
        )
        return self._policy_llm
