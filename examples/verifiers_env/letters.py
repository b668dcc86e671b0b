"""An environment in the format of verifiers: write so many letters."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Letters"]


class LettersData(vf.TaskData):
    count: int


class LettersTask(vf.Task[LettersData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def close(self, trace: vf.Trace) -> float:
        letters = sum(character.isalpha() for character in trace.last_reply)
        return 1 / (1 + abs(letters - self.data.count))

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= 2 * self.data.count)


class Letters(vf.Taskset[LettersTask, vf.TasksetConfig]):
    def load(self) -> Iterator[LettersTask]:
        for count in range(1, 9):
            yield LettersTask(LettersData(prompt=f"Write {count} letters.", count=count), self.config.task)
