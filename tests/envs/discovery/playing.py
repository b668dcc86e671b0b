"""A run of the example with a policy that proposes programs from a fixed list, with noise: a program, to be killed.

    python -m tests.envs.discovery.playing DIRECTORY STEPS [--resume]

What the simulated service samples is noise; the chat format reads programs out of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from rlkit._util import threads
from rlkit.chat.format import ParsedReply
from rlkit.config.loading.load import load_config
from rlkit.testing import ByteChat, Latency, SimulatedTinker
from rlkit.training.trainer import RLTrainer
from rlkit.types import Tokens

EXAMPLE = Path(__file__).parents[3] / "examples" / "erdos.yaml"
SMALL = ["model=simulated", "batch.groups=2", "batch.group_size=4", "optimizer.learning_rate=1e-4"]
ARGS = ["options.n_points=24", "program_timeout_s=5", "workers=2"]

HEAD = "import numpy as np\ndef run(seed, budget_s):\n    rng = np.random.default_rng({noise})\n    h = {initial}\n"
PROGRAMS = (
    "    return np.clip(h + rng.normal(0, 0.02, len(h)), 0, 1)",
    "    return (h + h[::-1]) / 2",
    "    return 0.5 + (h - 0.5) * rng.uniform(0.7, 1.0)",
    "    return polish(h, 0.05)",
    "    return h * 3",
    "    raise ValueError('no luck')",
    None,
)
"""What a program does after its head; the last is no program at all."""


class FromAList(ByteChat):
    """Reads a completion as one of the programs, with the completion itself for noise."""

    def parse(self, completion: Tokens) -> ParsedReply:
        noise = int(np.sum(completion.astype(np.int64) * np.arange(1, len(completion) + 1)))
        body = PROGRAMS[noise % len(PROGRAMS)]
        code = HEAD.replace("{noise}", str(noise)).replace("{initial}", "initial_h_values") + (body or "")
        text = "I have no idea." if body is None else f"```python\n{code}\n```"
        return ParsedReply({"role": "assistant", "content": text})


def main(directory: Path, steps: int, *, resume: bool) -> None:
    values = [f"envs.erdos.args.{argument}" for argument in ARGS]
    resolved = load_config([EXAMPLE], [*SMALL, *values, f"steps={steps}"])
    latency = Latency(first_s=0.01, token_s=0.0, gradient_s=0.01, step_s=0.01, save_s=0.01, load_s=0.01)
    trainer = RLTrainer(
        resolved, directory=directory, resume=resume, service=SimulatedTinker(latency=latency), chat=FromAList()
    )
    threads.run(trainer.train())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), resume="--resume" in sys.argv)
