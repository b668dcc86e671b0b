"""A server of OpenEnv, with its own package: `python server.py PORT`."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Guessing(Environment[Guess, Hint, State]):
    """Find a number from 0 to 9, the last digit of the seed, with five guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self.guesses = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.number, self.guesses = (seed or 0) % 10, 0
        return Hint(text="Guess a number from 0 to 9.", metadata={"seed": seed})

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.number > 99:
            raise ValueError("the number is too large")
        self.guesses += 1
        if action.number == self.number:
            return Hint(text="Right.", reward=1.0, done=True)
        text = "Higher." if action.number < self.number else "Lower."
        return Hint(text=text, reward=-0.25, done=self.guesses == 5)

    @property
    def state(self) -> State:
        return State(step_count=self.guesses)


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
