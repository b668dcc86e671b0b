"""Compare the CPU time of a trial with rlkit's terminal agent and with Harbor's own, on the same replies.

    uv run python benchmarks/terminal.py [--turns 50] [--tokens 30000]

Each agent plays one trial in the local sandbox, in a separate process, with the same replies and terminal output. `cpu`
is the process time of the whole trial: sandbox, agent and verifier. Sampling takes no time. Harbor's Terminus2 collects
rollout details, as training requires, and gets the tokens that rlkit's agent recorded. rlkit's agent also renders and
tokenises each prompt with a byte-level BPE tokenizer (`chat`, a part of its `cpu`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["HARBOR_TELEMETRY"] = "0"

if TYPE_CHECKING:
    from harbor.models.trial.config import AgentConfig

    from rlkit.policy import Policy
    from rlkit.rollout.recorder import RecordingPolicy

OPENING_TOKENS = 1500
TOKENS_PER_NUMBER = 5
SETTINGS = """schema_version = "1.0"
[metadata]
[agent]
timeout_sec = 600
[verifier]
timeout_sec = 60
[environment]
build_timeout_sec = 60
"""
FILES = {
    "instruction.md": "Count.",
    "task.toml": SETTINGS,
    "environment/Dockerfile": "FROM example\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument(
        "--tokens", type=int, default=30_000, help="approximate tokens of the last prompt and its reply"
    )
    parser.add_argument("--side", choices=["rlkit", "harbor"], help="play one side in this process")
    parser.add_argument("--folder", type=Path, help="folder of intermediate files")
    options = parser.parse_args()
    if options.side:
        os.environ["RLKIT_CACHE_DIR"] = str(options.folder / "cache")
        row = asyncio.run(measured(options.side, options.folder, turns=options.turns, tokens=options.tokens))
        print(json.dumps(row))
        return
    with tempfile.TemporaryDirectory() as folder:
        rlkit_row, harbor_row = (in_its_own_process(side, Path(folder)) for side in ("rlkit", "harbor"))
    print(f"{rlkit_row['turns']:.0f} turns, {rlkit_row['tokens']:.0f} tokens of context at the end")
    for name, row in (("rlkit", rlkit_row), ("harbor", harbor_row)):
        files = (
            f"result.json {row['result_bytes'] / 1e6:.2f} MB, trajectory.json {row['trajectory_bytes'] / 1e6:.2f} MB"
        )
        print(f"{name:6}  cpu {row['cpu_s']:6.2f} s, of which chat {row.get('chat_s', 0):.2f} s;  {files}")
    print(f"Harbor's agent takes {harbor_row['cpu_s'] / rlkit_row['cpu_s']:.0f} times the CPU of rlkit's.")


def in_its_own_process(side: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


async def measured(side: str, folder: Path, *, turns: int, tokens: int) -> dict[str, float]:
    """Play a trial, after a short one for imports and the build of the task."""
    task = folder / "task"
    for name, text in FILES.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    row = dict[str, float]()
    for name, count in (("short", 3), ("long", turns)):
        script = folder / f"{name}.json"
        row = await (run_rlkit if side == "rlkit" else run_harbor)(task, script, replies(count, tokens=tokens))
    return row


def replies(turns: int, *, tokens: int) -> list[str]:
    """Return replies of a length that makes the last context about `tokens` tokens."""
    each = (tokens - OPENING_TOKENS) // turns
    analysis = "What the terminal shows is what was to be expected, and nothing else has changed. " * 4
    numbers = max((each - 250) // TOKENS_PER_NUMBER, 1)
    texts = list[str]()
    for turn in range(turns):
        complete = turn >= turns - 2
        keys = f"seq -s ' ' {1000 + turn} {1000 + turn + numbers}\n"
        commands = [] if complete else [{"keystrokes": keys, "duration": 0.05}]
        texts.append(json.dumps({"analysis": analysis, "plan": "-", "commands": commands, "task_complete": complete}))
    return texts


async def run_rlkit(task: Path, script: Path, reply_texts: Sequence[str]) -> dict[str, float]:
    from harbor.models.trial.config import AgentConfig

    policy, chat = timed_policy(task.parent / "model", reply_texts)
    agent = AgentConfig(import_path="rlkit.envs.harbor.agents.terminus:PolicyTerminus2")
    row = await trial(task, agent, policy)
    turns, sequences, recorded_turns = policy.turns, list[list[int]](), list[dict[str, object]]()
    for text, turn in zip(reply_texts, turns, strict=True):
        before = [] if turn.parent is None else sequences[turn.parent]
        prompt = [*before, *turn.prompt.tokens.tolist()]
        sequences.append([*prompt, *turn.completion.tolist()])
        recorded_turns.append({"text": text, "prompt": prompt, "completion": turn.completion.tolist()})
    await asyncio.to_thread(script.write_text, json.dumps(recorded_turns))
    assert all(turn.parent == number - 1 for number, turn in enumerate(turns) if number)
    return {**row, "chat_s": chat[0], "tokens": len(sequences[-1])}


async def run_harbor(task: Path, script: Path, reply_texts: Sequence[str]) -> dict[str, float]:
    from harbor.models.trial.config import AgentConfig

    options = {
        "collect_rollout_details": True,
        "enable_summarize": False,
        "record_terminal_session": False,
        "suppress_max_turns_warning": True,
        "llm_kwargs": {"script": str(script)},
    }
    return await trial(task, AgentConfig(import_path="stock_agent:StockTerminus2", model_name="m", kwargs=options))


async def trial(task: Path, agent: AgentConfig, policy: Policy | None = None) -> dict[str, float]:
    from harbor.models.trial.config import EnvironmentConfig, TaskConfig, TrialConfig
    from harbor.trial.trial import Trial

    config = TrialConfig(
        task=TaskConfig(path=task),
        trials_dir=task.parent / "trials",
        agent=agent,
        environment=EnvironmentConfig(import_path="rlkit.envs.harbor.sandbox:LocalSandbox"),
    )
    harbor_trial = await Trial.create(config)
    if policy is not None:
        harbor_trial.agent.policy = policy
    started = time.process_time()
    result = await harbor_trial.run()
    cpu_s = time.process_time() - started
    if result.exception_info is not None:
        sys.exit(result.exception_info.exception_traceback)
    folder = task.parent / "trials" / result.trial_name
    return {
        "cpu_s": cpu_s,
        "turns": result.agent_result.metadata["n_episodes"],
        "result_bytes": (folder / "result.json").stat().st_size,
        "trajectory_bytes": (folder / "agent" / "trajectory.json").stat().st_size,
    }


def timed_policy(model: Path, reply_texts: Sequence[str]) -> tuple[RecordingPolicy, list[float]]:
    """Return a policy with these replies, and a list with one item: the CPU seconds of its `chat`."""
    import numpy as np

    from rlkit.chat.renderers import TemplateChat
    from rlkit.rollout.recorder import RecordingPolicy
    from rlkit.testing import tiny_model
    from rlkit.tokenizers.load import load_tokenizer
    from rlkit.types import Completion, Prompt, Reply, Sampling

    if not model.exists():
        tiny_model(model)
    chat = TemplateChat(load_tokenizer(str(model), with_weights=False, note=print))
    end = np.array(chat.stop[:1], np.int32)
    # not the tokenizer's own tokens for the text, because models sometimes sample others
    cut = len('{"ana')
    script = iter([np.concatenate([chat.encode(text[:cut]), chat.encode(text[cut:]), end]) for text in reply_texts])
    spent = [0.0]

    class Scripted:
        version = 0

        async def sample(
            self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
        ) -> Sequence[Completion]:
            tokens = next(script)
            return [Completion(tokens, np.full(len(tokens), -1.0, np.float32), "stop")]

    class Timed(RecordingPolicy):
        async def chat(self, *args: Any, **kwargs: Any) -> Reply:
            started = time.process_time()
            try:
                return await super().chat(*args, **kwargs)
            finally:
                spent[0] += time.process_time() - started

    sampler = Scripted()
    sampling = Sampling(max_tokens=4096)
    return Timed(sampler=lambda: sampler, chat=chat, sampling=sampling, seed=lambda turn: turn), spent


if __name__ == "__main__":
    main()
