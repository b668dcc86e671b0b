"""Harbor's Terminus2 with a model that reads its replies and their tokens from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import override

from harbor.agents.terminus_2.terminus_2 import Terminus2
from harbor.llms.base import BaseLLM, LLMResponse
from harbor.models.metric import UsageInfo

CONTEXT_TOKENS = 1 << 20


class StockTerminus2(Terminus2):
    @override
    def _init_llm(self, *args: object, **kwargs: object) -> BaseLLM:
        script = (self.options.llm_kwargs or {})["script"]
        return FromFile(json.loads(Path(script).read_text()))


class FromFile(BaseLLM):
    """Return each turn with the data for training: token ids of prompt and reply, and log-probabilities."""

    def __init__(self, turns: list[dict[str, object]]) -> None:
        super().__init__()
        self._turns = iter(turns)

    @override
    async def call(self, prompt: str, **kwargs: object) -> LLMResponse:
        turn = next(self._turns)
        completion = list(turn["completion"])
        tokens = list(turn["prompt"])
        usage = UsageInfo(prompt_tokens=len(tokens), completion_tokens=len(completion), cache_tokens=0, cost_usd=0.0)
        return LLMResponse(
            content=str(turn["text"]),
            usage=usage,
            prompt_token_ids=tokens,
            completion_token_ids=completion,
            logprobs=[-0.123456789] * len(completion),
        )

    @override
    def get_model_context_limit(self) -> int:
        return CONTEXT_TOKENS

    @override
    def get_model_output_limit(self) -> int | None:
        return None
