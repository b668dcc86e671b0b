"""A model of the simulated service that says what a function writes, in the tokens and the format of the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from rlkit._util import threads
from rlkit.chat.format import ChatFormat
from rlkit.chat.renderers import load_chat
from rlkit.config.loading.resolved import ResolvedConfig
from rlkit.testing import Latency, SimulatedTinker, World
from rlkit.testing.futures import SimulatedFuture
from rlkit.testing.simulated_service import SimulatedSamplingClient, SimulatedTrainingClient
from rlkit.trackers import RunResult
from rlkit.training.trainer import RLTrainer

AT_ONCE = Latency(first_s=0.001, token_s=0, gradient_s=0.001, step_s=0.001, save_s=0.001, load_s=0.001)


@dataclass
class Requests:
    """Requests of a run to the service.

    Args:
        sampled: the settings of each request for samples.
        gradients: of each request for a gradient, how many sequences, the loss and its settings.
        updates: the settings of each optimiser step.
    """

    sampled: list[types.SamplingParams] = field(default_factory=list)
    gradients: list[tuple[int, str, dict[str, float] | None]] = field(default_factory=list)
    updates: list[types.AdamParams] = field(default_factory=list)


def train(
    resolved: ResolvedConfig,
    author: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    directory: Path,
    world: World | None = None,
) -> tuple[RunResult, Requests]:
    """Train on a simulated service; the chat format is the configured model's own.

    Args:
        resolved: of the run.
        author: writes a reply, given the text of the conversation so far.
        monkeypatch: has the service watched and scripted.
        directory: of the run.
        world: of the service, where it is to outlive the run.
    """
    chat = load_chat(resolved.config, engine=False, note=lambda message: None)
    requests = Requests()
    with monkeypatch.context() as patched:
        _script(patched, chat, author, requests)
        service = SimulatedTinker(latency=AT_ONCE, world=world)
        trainer = RLTrainer(resolved, directory=directory, service=service, chat=chat)
        return threads.run(trainer.train()), requests


def _script(patched: pytest.MonkeyPatch, chat: ChatFormat, author: Callable[[str], str], requests: Requests) -> None:
    sample = SimulatedSamplingClient.sample
    gradient, update = SimulatedTrainingClient.forward_backward, SimulatedTrainingClient.optim_step

    def append_stop(reply: str, stop: str | Sequence[str] | Sequence[int] | None) -> np.ndarray[Any, Any]:
        first = (chat.stop if stop is None else stop)[0]
        return chat.encode(reply + first) if isinstance(first, str) else np.append(chat.encode(reply), np.int32(first))

    def sample_script(
        self: SimulatedSamplingClient, prompt: tinker.ModelInput, num_samples: int, params: types.SamplingParams
    ) -> Any:
        requests.sampled.append(params)
        answer = sample(self, prompt, num_samples, params)
        text = chat.decode(np.asarray(prompt.to_ints(), np.int32))
        completions = [append_stop(author(text), params.stop) for _ in range(num_samples)]
        assert all(len(tokens) <= (params.max_tokens or 0) for tokens in completions), "the script is too long"

        async def replace_tokens() -> types.SampleResponse:
            sequences = (await answer).sequences
            return types.SampleResponse(
                [_sequence(sequence, completion) for sequence, completion in zip(sequences, completions, strict=True)]
            )

        return SimulatedFuture(replace_tokens())

    def record_gradient(self: SimulatedTrainingClient, data: Any, loss_fn: str, loss_fn_config: Any = None) -> Any:
        requests.gradients.append((len(data), loss_fn, loss_fn_config))
        return gradient(self, data, loss_fn, loss_fn_config)

    def record_update(self: SimulatedTrainingClient, adam_params: types.AdamParams) -> Any:
        requests.updates.append(adam_params)
        return update(self, adam_params)

    patched.setattr(SimulatedSamplingClient, "sample", sample_script)
    patched.setattr(SimulatedTrainingClient, "forward_backward", record_gradient)
    patched.setattr(SimulatedTrainingClient, "optim_step", record_update)


def _sequence(sampled: types.SampledSequence, tokens: np.ndarray[Any, Any]) -> types.SampledSequence:
    return types.SampledSequence(
        stop_reason="stop",
        sequence_id=sampled.sequence_id,
        tokens_np=tokens.astype(np.int32),
        logprobs_np=np.full(len(tokens), -1, np.float32),
    )
