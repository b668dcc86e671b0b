"""Clients of a service under test, and measurements that several checks share.

Invariant: every answer counts in `usage`. Training checks start from copies of one saved state, so they can be compared
whether or not the service's seeds decide an adapter's first weights.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from random import Random
from typing import Protocol, cast

import numpy as np
import tinker
from tinker import types

from rlkit.conformance.objectives import CROSS_ENTROPY, Objective, Values
from rlkit.cost.usage import Usage

TOLERANCE = 0.05
"""Relative deviation up to which numbers of a service in bfloat16 count as equal."""

SGD_EPS = 1e4
"""`eps` with which Adam takes a gradient step."""

RANK = 8
_TEXT_TOKENS = 24
_TTL_S = 3600
_CLOSE_S = 30.0
_VISIBLE_CHANGE = 0.1  # of a log-probability, in nats: well above the noise of bfloat16
_SAMPLING = types.SamplingParams(max_tokens=8, stop=[], seed=1)


class Deviation(Exception):
    """A difference from the protocol; the message states the number."""


class Skipped(Exception):
    """A missing precondition of a check."""


class Future[T](Protocol):
    """A future of the SDK."""

    def result(self, timeout: float | None = None) -> T: ...  # noqa: D102  as in the standard library


def expect(condition: object, problem: str) -> None:
    """Raise `Deviation` with the problem unless the condition is true."""
    if not condition:
        raise Deviation(problem)


def expect_close(actual: Values | float | None, expected: Values | float, *, tolerance: float = TOLERANCE) -> str:
    """Return the largest difference relative to the largest expected number; raise `Deviation` above the tolerance."""
    values, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    expect(values.shape == expected.shape, f"shape {values.shape} instead of {expected.shape}")
    scale = float(np.abs(expected).max(initial=0.0))
    difference = float(np.abs(values - expected).max(initial=0.0)) / max(scale, 1e-12)
    expect(difference <= tolerance, f"differs by {difference:.2g} of {scale:.4g}")
    return f"relative difference {difference:.1g}"


def make_datum(tokens: Sequence[int], **inputs: Sequence[float]) -> types.Datum:
    """Return next-token prediction of `tokens`, without weights unless `inputs` has them."""
    values = {"target_tokens": list(tokens[1:]), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens[:-1])), loss_fn_inputs=values)  # pyright: ignore[reportArgumentType]  lists are converted


def read_logprobs(output: types.ForwardBackwardOutput) -> list[Values]:
    """Return the log-probabilities of each datum."""
    return [np.asarray(record["logprobs"].to_numpy(), np.float64) for record in output.loss_fn_outputs]


class ServiceProbe:
    """Connection to the service under test.

    Args:
        timeout_s: limit in seconds of each answer.
        seed: seed of the tokens.
    """

    def __init__(self, url: str, api_key: str | None, model: str, *, timeout_s: float, seed: int) -> None:
        self.url, self.api_key, self.model = url, api_key, model
        self.usage = Usage()
        self._timeout_s = timeout_s
        random = Random(seed)
        self.text = [random.randrange(32, 126) for _ in range(_TEXT_TOKENS)]  # in every vocabulary
        self.datum = make_datum(self.text, weights=[1.0] * (_TEXT_TOKENS - 1))
        self.zero_datum = make_datum(self.text, weights=[0.0] * (_TEXT_TOKENS - 1))  # its gradient is 0
        self._main_session = self.client = tinker.ServiceClient(base_url=url, api_key=api_key)
        self.rest = tinker.RestClient(base_url=url, api_key=api_key)
        self._paths: list[str] = []

    def close(self) -> None:
        """Delete the checkpoints of the suite and end its session."""
        deletions = [self.rest.delete_checkpoint_from_tinker_path(path) for path in self._paths]
        for future in [*deletions, self._main_session.close("success")]:
            with suppress(tinker.TinkerError, TimeoutError):  # deleted by a check, or expires
                future.result(_CLOSE_S)

    @contextmanager
    def session(self) -> Generator[None]:
        """Open a session for the adapters of one check; the service frees their memory at its end."""
        self.client = tinker.ServiceClient(base_url=self.url, api_key=self.api_key)
        try:
            yield
        finally:
            self.wait(self.client.close("success"))

    def wait[T](self, future: Future[T]) -> T:
        """Return the result of a future."""
        try:
            return future.result(self._timeout_s)
        except TimeoutError:
            raise Deviation(f"no answer within {self._timeout_s:g} s") from None

    @cached_property
    def trainer(self) -> tinker.TrainingClient:
        """An adapter that no check trains; its weights are the start of all others."""
        return self.wait(self._main_session.create_lora_training_client(base_model=self.model, rank=RANK, seed=0))

    @cached_property
    def sampler(self) -> tinker.SamplingClient:
        """A sampler of the base model."""
        return self.wait(self._main_session.create_sampling_client(base_model=self.model))

    def fork(self) -> tinker.TrainingClient:
        """Return a new client with the weights of the start and a new optimiser."""
        return self.wait(self.client.create_training_client_from_state(self._start_path))

    @cached_property
    def _start_path(self) -> str:
        return self.save_state(self.trainer)

    def save_state(self, trainer: tinker.TrainingClient) -> str:
        """Save a training state for the time of the suite; return its path."""
        self._paths.append(self.wait(trainer.save_state("rlkit-check", ttl_seconds=_TTL_S)).path)
        return self._paths[-1]

    def save_sampler(self, trainer: tinker.TrainingClient) -> str:
        """Save sampler weights for the time of the suite; return their path."""
        self._paths.append(self.wait(trainer.save_weights_for_sampler("rlkit-check", ttl_seconds=_TTL_S)).path)
        return self._paths[-1]

    def forward(
        self, trainer: tinker.TrainingClient, *data: types.Datum, objective: Objective = CROSS_ENTROPY
    ) -> types.ForwardBackwardOutput:
        """Compute a loss without a gradient."""
        self.usage.add_training(sum(datum.model_input.length for datum in data))
        return self.wait(trainer.forward(list(data), objective.loss, objective.settings))

    def logprobs(self, trainer: tinker.TrainingClient, tokens: Sequence[int] | None = None) -> Values:
        """Return the trainer's log-probabilities of all tokens but the first; of the suite's text by default."""
        return read_logprobs(self.forward(trainer, make_datum(tokens or self.text)))[0]

    @cached_property
    def start_logprobs(self) -> Values:
        """Log-probabilities of the text before any training."""
        return self.logprobs(self.trainer)

    def backward(
        self, trainer: tinker.TrainingClient, *data: types.Datum, objective: Objective = CROSS_ENTROPY
    ) -> Future[types.ForwardBackwardOutput]:
        """Submit the computation of a gradient."""
        self.usage.add_training(sum(datum.model_input.length for datum in data))
        return trainer.forward_backward(list(data), objective.loss, objective.settings)

    def step(
        self, trainer: tinker.TrainingClient, *data: types.Datum, rate: float, **adam: float
    ) -> Mapping[str, float]:
        """Take an optimiser step of cross-entropy, by default of the text; return its metrics."""
        self.backward(trainer, *(data or [self.datum]))
        return self.wait(trainer.optim_step(types.AdamParams(learning_rate=rate, **adam))).metrics or {}

    def descend(self, trainer: tinker.TrainingClient, *data: types.Datum, share: float = 1.0) -> None:
        """Take a gradient step of cross-entropy with a share of `sgd_rate`, by default of the text."""
        self.step(trainer, *data, rate=share * self.sgd_rate, eps=SGD_EPS)

    def take_sgd_step(self, trainer: tinker.TrainingClient, share: float = 1.0) -> None:
        """Take a step along the accumulated gradient with a share of `sgd_rate`."""
        self.wait(trainer.optim_step(types.AdamParams(learning_rate=share * self.sgd_rate, eps=SGD_EPS)))

    def change(self, train: Callable[[tinker.TrainingClient], object]) -> Values:
        """Return the change of the text's log-probabilities by training a copy of the start."""
        trainer = self.fork()
        train(trainer)
        return self.logprobs(trainer) - self.start_logprobs

    def measure_slopes(self, descend: Callable[..., object]) -> Values:
        """Extrapolate the changes by a step and by half a step to the slopes at 0, times the step."""
        whole, half = (self.change(partial(descend, share=share)) for share in (1.0, 0.5))
        return 4 * half - whole

    @cached_property
    def text_slopes(self) -> Values:
        """Slopes of the text's log-probabilities along a step of its cross-entropy."""
        return self.measure_slopes(self.descend)

    @cached_property
    def adam_rate(self) -> float:
        """Learning rate with which one step of Adam on the text visibly changes it."""
        return self._search_rate(1e-4, eps=1e-12)

    @cached_property
    def sgd_rate(self) -> float:
        """Learning rate of a visible gradient step: with `SGD_EPS`, Adam's step is rate/eps · g."""
        return self._search_rate(1e-6 * SGD_EPS, eps=SGD_EPS)

    def _search_rate(self, rate: float, *, eps: float) -> float:
        for _ in range(12):
            if np.abs(self.change(partial(self.step, rate=rate, eps=eps))).max() >= _VISIBLE_CHANGE:
                return rate
            rate *= 4
        raise Deviation(f"a step with learning rate {rate:.2g} and eps {eps:g} changes no log-probability by 0.1")

    def sample(
        self,
        sampler: tinker.SamplingClient | None = None,
        *,
        prompt: Sequence[int] | None = None,
        samples: int = 1,
        **arguments: object,
    ) -> types.SampleResponse:
        """Sample after the text, by default 8 tokens with `stop=[]` and seed 1.

        Args:
            arguments: fields of `SamplingParams`, and arguments of the SDK's `sample`.
        """
        prompt = self.text if prompt is None else prompt
        fields = types.SamplingParams.model_fields
        settings = _SAMPLING.model_copy(update={name: value for name, value in arguments.items() if name in fields})
        options = {name: value for name, value in arguments.items() if name not in fields}
        ask = cast("Callable[..., Future[types.SampleResponse]]", (sampler or self.sampler).sample)
        response = self.wait(ask(types.ModelInput.from_ints(list(prompt)), samples, settings, **options))
        lengths = [len(sequence.tokens) for sequence in response.sequences]
        self.usage.add_sampling(prompt=len(prompt), cached=0, completions=lengths or [0])
        return response

    def score(self, sampler: tinker.SamplingClient, tokens: Sequence[int] | None = None) -> Values:
        """Return a sampler's log-probabilities of all tokens but the first; of the suite's text by default."""
        tokens = self.text if tokens is None else tokens
        values = self.wait(sampler.compute_logprobs(types.ModelInput.from_ints(list(tokens))))
        self.usage.add_sampling(prompt=len(tokens), cached=0, completions=[1])
        expect(len(values) == len(tokens), f"{len(values)} log-probabilities of {len(tokens)} prompt tokens")
        expect(values[0] is None, f"the first prompt token has the log-probability {values[0]}")
        return np.array(values[1:], np.float64)
