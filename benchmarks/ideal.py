"""Compute the durations of ideal schedules of a workload from the durations of its rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import workloads
from workloads import Workload

from rlkit.testing.world import Latency


@dataclass(frozen=True, slots=True)
class Ideal:
    """Seconds of a step: with the ideal schedules, and with all rollouts in sequence."""

    sync: float
    stream: float
    serial: float


def ideal(workload: Workload) -> Ideal:
    """Play all rollouts without a training loop, and compute the durations of the schedules."""
    from service import Log, Sampling
    from tinker import types

    from rlkit.testing import World, run_virtual

    params = types.SamplingParams(max_tokens=workloads.MAX_TOKENS)

    async def play(task: int, sampler: Sampling) -> tuple[float, int]:
        clock = asyncio.get_running_loop().time
        began, turn, last = clock(), 1, 1
        tokens = list(workloads.question(task).encode())
        while True:
            reply = (await sampler.sample(types.ModelInput.from_ints(tokens), 1, params)).sequences[0].tokens
            if turn == 1:
                last = workloads.turns(workload, reply)
            await workloads.use_tool(workload, reply)
            tokens = [*tokens, *reply]
            if turn == last:
                return clock() - began, len(tokens) - 1
            tokens += workloads.observation(turn)
            turn += 1

    async def play_all() -> list[tuple[float, int]]:
        from service import Client

        client = Client(World(), workload.latency, Log())
        trainer = await client.create_lora_training_client("simulated")
        sampler = await trainer.save_weights_and_get_sampling_client()
        tasks = workload.steps * workload.groups
        return await asyncio.gather(*(play(task, sampler) for task in range(tasks) for _ in range(workload.group_size)))

    rollouts = run_virtual(play_all())
    size, latency = workload.group_size, workload.latency
    groups = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
    sync = stream = 0.0
    for start in range(0, len(groups), workload.groups):
        batch = [
            (max(s for s, _ in group), sum(n for _, n in group)) for group in groups[start : start + workload.groups]
        ]
        after = latency.step_s + latency.save_s
        tokens_s = sum(tokens for _, tokens in batch) / latency.trained_tokens_per_s
        sync += max(finished for finished, _ in batch) + latency.gradient_s + tokens_s + after
        stream += best_stream(sorted(batch), latency) + after
    last = latency.save_s  # the transfer of the last weights does not count
    steps = workload.steps
    return Ideal((sync - last) / steps, (stream - last) / steps, sum(s for s, _ in rollouts) / steps)


def best_stream(groups: Sequence[tuple[float, int]], latency: Latency) -> float:
    """Return the earliest end of the last gradient over all ways to join finished groups into requests, in order."""
    done = [0.0]
    for end in range(1, len(groups) + 1):
        finished = groups[end - 1][0]
        choices = [
            max(done[begin], finished) + latency.gradient_s + tokens / latency.trained_tokens_per_s
            for begin in range(end)
            for tokens in [sum(count for _, count in groups[begin:end])]
        ]
        done.append(min(choices))
    return done[-1]
