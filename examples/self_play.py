"""Self-play: learn the game of Nim against an earlier checkpoint of oneself.

    python examples/self_play.py

Two players take 1, 2 or 3 sticks in turn; who takes the last one wins. A move that breaks the rules loses. The model
begins with random weights and learns the rules first. On two cores, 40 steps take about 80 s: games without a broken
rule rise to 1.00, best moves from 0.00 to 0.67, and the reward against the weights of four steps before ends at 0.51.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

import rlkit
from rlkit.testing import byte_model

PILES = range(5, 10)
MOVES = {"1": 1, "2": 2, "3": 3}


@dataclass(frozen=True)
class Nim(rlkit.Env):
    """A game that begins with `pile` sticks. The policy has the reward 1 if it wins."""

    pile: int
    begins: bool

    @property
    def task_id(self) -> str:
        return f"{self.pile} {'first' if self.begins else 'second'}"

    async def rollout(self, policy: rlkit.Policy) -> rlkit.Outcome:
        player, opponent = policy.role("player"), policy.opponent(step=-4)
        left, is_players_turn = self.pile, self.begins
        metrics, best = {"legal": 1.0}, list[bool]()
        while True:
            reply = await (player if is_players_turn else opponent).sample(f"{left}")
            taken = MOVES.get(reply.text[:1], left + 1)
            if is_players_turn:
                metrics["legal"] = float(taken <= left)
                best += [taken == left % 4] if left % 4 else []  # otherwise no move wins
            if taken >= left:
                break
            left, is_players_turn = left - taken, not is_players_turn
        if best:
            metrics["best_moves"] = sum(best) / len(best)
        player_wins = is_players_turn == (taken == left)
        return rlkit.Outcome(float(player_wins), metrics)


def games() -> list[Nim]:
    return [Nim(pile, begins) for pile in PILES for begins in (True, False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="name or directory of the model; by default a tiny one with random weights")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=10, help="games per step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = rlkit.train(
            model=arguments.model or str(byte_model(Path(folder))),
            envs=games(),
            steps=arguments.steps,
            batch={"groups": arguments.groups, "group_size": 16},
            sampling={"max_tokens": 1},
            optimizer={"learning_rate": 3e-3},
            lora={"rank": 16, "train_unembed": True},
            checkpoint={"every": 2},
        )
    print(f"mean reward of the last step: {result.metrics['env/all/reward/mean']:.2f}; the run is {result.directory}")


if __name__ == "__main__":
    main()
