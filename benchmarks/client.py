"""Compare the client costs of rlkit and tinker-cookbook on the same work in the same run.

    uv run python benchmarks/client.py
    PYTHONPATH=DIR uv run python benchmarks/client.py       (an unpacked wheel of tinker-cookbook)

    assembly    tokens per second for turning a group of 8 rollouts into the SDK's training data, with advantages; the
                data of both must be equal
    memory      bytes per token of a rollout that waits to be trained on
    rollouts    CPU per rollout of a run with default logging: 16 groups of 8 per step, with one turn of 800 tokens, or
                four turns of 200 (`turns`). CPU of the work itself is subtracted: the same rollouts as bare calls to
                the simulated service, with their environment and event loop (`bare`), and the service's training
    stall       longest callback of the event loop, in CPU, over steps of a million tokens: 16 groups of 16, one turn of
                3,900 tokens; without the simulated service's computation
    import      CPU and memory of importing the package
    disk        bytes per token in RUN/episodes and RUN/updates: tokens of a vocabulary of 150,000 with the frequencies
                of words, with log-probabilities of sampler and trainer, versions and messages of four letters per token

CPU is process time, the best of a few rounds. Each contender runs in a separate process. All but `import` are bound to
one processor: if two processors are threads of one core, threads of a process would slow each other down, which would
count as CPU.
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
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import workloads

if TYPE_CHECKING:
    from tinker_cookbook.rl.types import TrajectoryGroup
    from workloads import Workload

    from rlkit.types import Completion, Group, Prompt, Sampling

GROUP_SIZE = 8
GIVEN, SAMPLED = 200, 800
VOCABULARY = 150_000
ROUNDS = 5
SIDES = ("rlkit", "cookbook")
LOOPS = ("single", "turns", "stall")

type Dialogue = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]]
"""For each turn: new prompt tokens, sampled tokens, and their log-probabilities."""


def dialogues(turns: int) -> list[Dialogue]:
    """Return the rollouts of a group."""
    rng = np.random.default_rng(turns)

    def turn() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        tokens = rng.integers(300, VOCABULARY, GIVEN + SAMPLED).astype(np.int32)
        return tokens[:GIVEN], tokens[GIVEN:], -rng.exponential(1, SAMPLED).astype(np.float32)

    return [[turn() for _ in range(turns)] for _ in range(GROUP_SIZE)]


def our_group(rollouts: Sequence[Dialogue]) -> Group:
    """Return a group as rlkit's policy handle records it."""
    from rlkit.rollout.recorder import RecordingPolicy
    from rlkit.testing import ByteChat
    from rlkit.types import Completion, Episode, Group, Sampling

    class Script:
        version = 0

        def __init__(self, dialogue: Dialogue) -> None:
            self._left = iter(dialogue)

        async def sample(
            self, prompt: Prompt, sampling: Sampling, *, seed: int, num_samples: int = 1
        ) -> list[Completion]:
            _, tokens, logprobs = next(self._left)
            return [Completion(tokens.copy(), logprobs.copy(), "stop")]

    async def play(member: int, dialogue: Dialogue) -> Episode:
        script = Script(dialogue)
        policy = RecordingPolicy(
            sampler=lambda: script, chat=ByteChat(), sampling=Sampling(max_tokens=SAMPLED), seed=lambda turn: turn
        )
        tokens = np.empty(0, np.int32)
        for prompt, _, _ in dialogue:
            tokens = np.concatenate([tokens, prompt])
            tokens = np.concatenate([tokens, (await policy.sample(tokens)).turn.completion])
        return Episode(member, 0, policy.turns, "completed", float(member % 2), {}, {}, 1.0)

    episodes = [asyncio.run(play(member, dialogue)) for member, dialogue in enumerate(rollouts)]
    return Group("work", "task", 0, tuple(episodes))


def their_group(rollouts: Sequence[Dialogue]) -> TrajectoryGroup:
    """Return the same group as the peer stores it: each turn with its complete prompt."""
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

    trajectories = list[Trajectory]()
    for member, dialogue in enumerate(rollouts):
        tokens, transitions = list[int](), list[Transition]()
        for number, (prompt, sampled, logprobs) in enumerate(dialogue, 1):
            tokens = tokens + prompt.tolist()
            action = TokensWithLogprobs(sampled.tolist(), logprobs.tolist())
            done = number == len(dialogue)
            model_input = tinker.ModelInput.from_ints(tokens)
            transitions.append(Transition(model_input, action, float(member % 2) if done else 0.0, done))
            tokens = tokens + action.tokens
        trajectories.append(Trajectory(transitions, tinker.ModelInput.from_ints([])))
    return TrajectoryGroup(trajectories, [0.0] * len(trajectories), [{} for _ in trajectories])


def best(work: Callable[[], object]) -> float:
    """Return the shortest process time of `work` in seconds, over a few rounds."""
    times = list[float]()
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def assembly() -> dict[str, float]:
    """Return the tokens per second of both sides, after checking that their data is equal."""
    from tinker_cookbook.rl import data_processing

    from rlkit.algorithms.datums import Preparation
    from rlkit.algorithms.estimators import GroupMean
    from rlkit.algorithms.losses import PPO
    from rlkit.tinker_client.sdk_types import to_datum

    rates, event_loop, loss = dict[str, float](), asyncio.new_event_loop(), PPO()
    preparation = Preparation({"work": GroupMean()})
    for turns in (1, 8, 40):
        rollouts = dialogues(turns)
        group, peer = our_group(rollouts), their_group(rollouts)

        def make_ours(group: Group = group) -> list[Any]:
            prepared = event_loop.run_until_complete(preparation.prepare(group))
            return [to_datum(datum, loss) for datum in prepared.data]

        def make_theirs(peer: TrajectoryGroup = peer) -> list[Any]:
            return data_processing.assemble_training_data([peer], data_processing.compute_advantages([peer]))[0]

        pairs = list(zip(make_ours(), make_theirs(), strict=True))
        assert len(pairs) == GROUP_SIZE
        for our_datum, their_datum in pairs:
            assert np.array_equal(our_datum.model_input.to_ints(), their_datum.model_input.to_ints())
            for name in ("target_tokens", "logprobs", "advantages"):
                our_values, their_values = our_datum.loss_fn_inputs[name], their_datum.loss_fn_inputs[name]
                assert our_values.dtype == their_values.dtype
                assert np.array_equal(np.asarray(our_values.data), np.asarray(their_values.data)), name
        tokens = GROUP_SIZE * turns * (GIVEN + SAMPLED)
        rates[f"rlkit/{turns}"] = tokens / best(make_ours)
        rates[f"cookbook/{turns}"] = tokens / best(make_theirs)
    return rates


def memory() -> dict[str, float]:
    """Return the bytes per token of a rollout in memory."""
    bytes_per_token = dict[str, float]()
    for make, side in ((our_group, "rlkit"), (their_group, "cookbook")):
        make(dialogues(1)[:1])
        for turns in (1, 8, 40):
            rollouts = dialogues(turns)[:1]
            tracemalloc.start()
            group = make(rollouts)
            bytes_per_token[f"{side}/{turns}"] = tracemalloc.get_traced_memory()[0] / (turns * (GIVEN + SAMPLED))
            tracemalloc.stop()
            del group
    return bytes_per_token


def disk() -> dict[str, float]:
    """Return the bytes per token of a step: its table of episodes and its table of updates."""
    from rlkit.algorithms.datums import Preparation, UpdateResult
    from rlkit.algorithms.estimators import GRPO
    from rlkit.algorithms.losses import PPO
    from rlkit.store import table
    from rlkit.token_records.updates import write_update
    from rlkit.types import Episode, Group, Message, Prompt, Turn

    rng = np.random.default_rng(0)
    words = ["".join(map(chr, letters)) for letters in rng.integers(97, 123, (VOCABULARY, 4))]

    def tokens(count: int) -> np.ndarray[Any, Any]:
        return np.minimum(rng.zipf(1.2, count), VOCABULARY - 1).astype(np.int32)

    def turn(number: int) -> Turn:
        logprobs = -rng.exponential(0.5, SAMPLED).astype(np.float32)
        flags = np.ones(SAMPLED, np.bool_)
        parent = number - 1 if number else None
        prompt, reply = tokens(GIVEN), tokens(SAMPLED)
        texts = ["".join(words[token] for token in part.tolist()) for part in (prompt, reply)]
        messages: tuple[Message, ...] = (
            {"role": "user", "content": texts[0]},
            {"role": "assistant", "content": texts[1]},
        )
        seconds = rng.random()
        return Turn(Prompt(prompt), reply, logprobs, flags, "stop", 3, parent, seconds=seconds, messages=messages)

    def group(draw: int) -> table.RecordedGroup:
        episodes = [
            Episode(member, 0, tuple(map(turn, range(4))), "completed", rng.random(), {"correct": 1.0}, {}, 1.0)
            for member in range(GROUP_SIZE)
        ]
        return table.RecordedGroup(Group("work", f"task-{draw}", draw, tuple(episodes)), True, episodes)

    with tempfile.TemporaryDirectory() as folder:
        episodes, updates = (Path(folder) / name for name in ("episodes.parquet", "updates.parquet"))
        groups = list(map(group, range(8)))
        table.write(episodes, groups)
        preparation = Preparation({"work": GRPO()})
        prepared = [asyncio.run(preparation.prepare(recorded.group)) for recorded in groups]
        # A trainer's log-probabilities differ from the sampler's: by 1e-5 on the engine, by more on other services.
        rows = [
            datum.logprobs + rng.normal(0, 1e-3, len(datum.targets)).astype(np.float32)
            for each in prepared
            for datum in each.data
        ]
        result = UpdateResult(prepared, rows, {}, PPO(), 1e-4)
        write_update(updates, 1, prepared, result, estimators={"work": "grpo"})
        sizes = {"rlkit/episodes": episodes.stat().st_size, "rlkit/updates": updates.stat().st_size}
        return {name: size / (8 * GROUP_SIZE * 4 * (GIVEN + SAMPLED)) for name, size in sizes.items()}


def bare_run(workload: Workload, log: Any) -> None:
    """Play the rollouts of a run as bare calls to the simulated service."""
    from service import Client
    from tinker import types

    from rlkit.testing import World, run_virtual

    params = types.SamplingParams(max_tokens=workloads.MAX_TOKENS)

    async def play(sampler: Any, task: int) -> None:
        tokens, turn, last = list(workloads.question(task).encode()), 1, 1
        while True:
            reply = (await sampler.sample(types.ModelInput.from_ints(tokens), 1, params)).sequences[0].tokens_np
            if turn == 1:
                last = workloads.turns(workload, reply)
            await workloads.use_tool(workload, reply)
            if turn == last:
                workloads.reward(workload, task, reply)
                return
            tokens += [*reply.tolist(), *workloads.observation(turn)]
            turn += 1

    async def play_all() -> None:
        trainer = await Client(World(), workload.latency, log).create_lora_training_client("simulated")
        for step in range(workload.steps):
            sampler = await trainer.save_weights_and_get_sampling_client()
            tasks = range(step * workload.groups, (step + 1) * workload.groups)
            await asyncio.gather(*(play(sampler, task) for task in tasks for _ in range(workload.group_size)))

    run_virtual(play_all())


def loop(side: str, what: str) -> dict[str, Any]:
    """Run on the simulated service; return CPU per rollout, the longest callback, and bytes logged."""
    from schedule import Run, cookbook_run, rlkit_run
    from service import Log
    from workloads import WORKLOADS

    from rlkit.testing import Latency

    if side == "cookbook":
        import cookbook

        cookbook.prepare()
    small = replace(WORKLOADS["small"], groups=16, steps=4, latency=Latency(mean_tokens=800, sigma=0.3))
    workload = {
        "single": small,
        "turns": replace(small, turns=(4, 4), tool_s=1.0, latency=Latency(mean_tokens=200, sigma=0.3)),
        "stall": replace(small, group_size=16, steps=2, latency=Latency(mean_tokens=3900, sigma=0.2)),
    }[what]
    stall, log = dict[str, Any](), Log()
    # reading the clock at each callback would count as CPU
    watched = longest_callback(log, stall) if what == "stall" else nullcontext()
    with tempfile.TemporaryDirectory() as folder, watched:
        for measured in (replace(workload, steps=1, groups=2), workload):  # the first run warms up
            WORKLOADS["measured"] = measured  # type: ignore[index]  a workload of this benchmark only
            log.cpu_s, log.began_s = 0.0, None
            log.steps.clear()
            stall.clear()
            began, directory = time.process_time(), Path(folder) / str(measured.steps)
            if side == "bare":
                bare_run(measured, log)
            else:
                (rlkit_run if side == "rlkit" else cookbook_run)(Run("measured", "sync"), directory, log=log)
            cpu_s = time.process_time() - began
    rollouts = workload.steps * workload.groups * workload.group_size
    return {**stall, "ms": (cpu_s - log.cpu_s) / rollouts * 1e3, "simulation": log.cpu_s / rollouts * 1e3}


class longest_callback:  # noqa: N801  a context manager
    """Find the callback of the event loop with the most CPU time, without the simulation's own."""

    def __init__(self, log: Any, stall: dict[str, Any]) -> None:
        self._log, self._stall = log, stall
        self._run = asyncio.Handle._run

    def __enter__(self) -> None:
        run, log, stall = self._run, self._log, self._stall

        def timed(handle: asyncio.Handle) -> None:
            simulated, began = log.cpu_s, time.thread_time()
            run(handle)
            callback_s = time.thread_time() - began - (log.cpu_s - simulated)
            if callback_s > stall.get("stall_s", 0.0):
                stall["stall_s"], stall["stall_in"] = callback_s, _name(handle)

        asyncio.Handle._run = timed  # type: ignore[method-assign]  times every callback

    def __exit__(self, *_: object) -> None:
        asyncio.Handle._run = self._run  # type: ignore[method-assign]  restores the method


def _name(handle: asyncio.Handle) -> str:
    callback = getattr(handle, "_callback", None)
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return f"{task.get_name()}: {getattr(task.get_coro(), '__qualname__', '?')}"
    return getattr(callback, "__qualname__", repr(callback))


def importing(package: str) -> dict[str, float]:
    """Return CPU seconds and MiB of a process that imports a package."""
    code = f"import resource, {package}; r = resource.getrusage(resource.RUSAGE_SELF); "
    command = [sys.executable, "-c", code + "print(r.ru_utime + r.ru_stime, r.ru_maxrss)"]
    runs = [subprocess.run(command, capture_output=True, check=True).stdout.split() for _ in range(ROUNDS)]
    return {"cpu_s": min(float(run[0]) for run in runs), "mib": min(float(run[1]) for run in runs) / 1024}


def contend(name: str) -> dict[str, Any]:
    """Measure in this process."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if name in ("assembly", "memory", "disk"):
        return {"assembly": assembly, "memory": memory, "disk": disk}[name]()
    side, what = name.split("-")
    return loop(side, what)


def run_in_process(name: str) -> dict[str, Any]:
    """Measure in a fresh process."""
    done = subprocess.run([sys.executable, __file__, "--contender", name], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_row(
    what: str, value: float, peer: float | None, ratio: float, target: float, *, is_minimum: bool, unit: str
) -> None:
    """Print a row; `is_minimum` says if the ratio must be at least the target, or at most."""
    met = "met" if (ratio >= target if is_minimum else ratio <= target) else "MISSED"
    peer_cell = " " * 12 if peer is None else f"{peer:>12.3g}"
    print(
        f"{what:30}{value:>12.3g}{peer_cell} {unit:10}{ratio:>9.3g}{'≥' if is_minimum else '≤':>4} {target:<7.3g}{met}",
        flush=True,
    )


def main() -> None:
    """Run the benchmark, or one contender of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="rounds of the measurements that run a training loop")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.contender:
        print(json.dumps(contend(options.contender)))
        return
    print(f"{'':30}{'rlkit':>12}{'cookbook':>12} {'unit':10}{'ratio':>9}{'target':>9}")
    mine = importing("rlkit")
    print_row("import, CPU", mine["cpu_s"], None, mine["cpu_s"], 0.25, is_minimum=False, unit="s")
    print_row("import, memory", mine["mib"], None, mine["mib"], 60, is_minimum=False, unit="MiB")
    per_token = sum(run_in_process("disk").values())
    print_row("disk", per_token, None, per_token, 10, is_minimum=False, unit="B/token")
    measurements = run_in_process("assembly")
    for turns, target in ((1, 5), (8, 5), (40, 8)):
        value, peer = (measurements[f"{side}/{turns}"] / 1e6 for side in SIDES)
        print_row(f"assembly, {turns} turns", value, peer, value / peer, target, is_minimum=True, unit="Mtoken/s")
    measurements = run_in_process("memory")
    for turns, target in ((1, 1), (8, 1 / 4), (40, 1 / 12)):
        value, peer = (measurements[f"{side}/{turns}"] for side in SIDES)
        print_row(f"memory, {turns} turns", value, peer, value / peer, target, is_minimum=False, unit="B/token")
    runs = {
        f"{side}-{what}": list[dict[str, Any]]()
        for what in LOOPS
        for side in (*SIDES, *(["bare"] if what != "stall" else []))
    }
    for _ in range(options.rounds):  # in turn, because a shared machine has slow minutes
        for name, contender_runs in runs.items():
            contender_runs.append(run_in_process(name))
    for what in ("single", "turns"):
        value, peer, bare_ms = (min(run["ms"] for run in runs[f"{side}-{what}"]) for side in (*SIDES, "bare"))
        value, peer = value - bare_ms, peer - bare_ms
        print_row(f"rollouts, {what}", value, peer, value / peer, 0.5, is_minimum=False, unit="ms")
    stalls = {side: min(runs[f"{side}-stall"], key=lambda run: run["stall_s"]) for side in SIDES}
    value, peer = (stalls[side]["stall_s"] * 1e3 for side in SIDES)
    print_row("stall", value, peer, value, 50, is_minimum=False, unit="ms")
    print(f"longest callback: rlkit {stalls['rlkit']['stall_in']}; cookbook {stalls['cookbook']['stall_in']}")


if __name__ == "__main__":
    main()
