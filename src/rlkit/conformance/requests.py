"""Checks of requests: sessions, order, repetition, errors, limits, cancellation, and clients that disappear."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

import tinker
from tinker import types
from tinker._client import AsyncTinker  # the SDK does not export the type
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.optim_step_request import OptimStepRequest

from rlkit.conformance.probe import Deviation, ServiceProbe, expect, expect_close, make_datum
from rlkit.errors import UsageError
from rlkit.tinker_client.sdk import translate_error

_LONG_TOKENS = 1000
_QUICK_S = 30.0
"""Limit in seconds of a short request beside a cancelled one. Long enough for a service that works in cycles."""

_DEAD_CLIENT_S = 120.0
"""Limit in seconds of a short request beside a dead client's; the SDK's clients send a heartbeat every 10 s."""

_DEAD_CLIENT = """
import os, sys, time, tinker
url, model, tokens = sys.argv[1:]
client = tinker.ServiceClient(base_url=url, api_key=os.environ.pop("KEY") or None)
sampler = client.create_sampling_client(base_model=model).result()
params = tinker.SamplingParams(max_tokens=int(tokens), stop=[])
prompt = tinker.ModelInput.from_ints([65, 66, 67])
futures = [sampler.sample(prompt, 64, params) for _ in range(4)]
time.sleep(3)  # the SDK sends them in the background
print("started", flush=True)
sys.stdin.read()
"""


def choose_model(url: str, api_key: str | None) -> str:
    """Return the first trainable model that a service advertises.

    Raises:
        UsageError: it advertises none.
    """
    capabilities = tinker.RestClient(base_url=url, api_key=api_key).get_server_capabilities().result()
    for model in capabilities.supported_models:
        if model.model_name and model.trainable is not False:
            return model.model_name
    raise UsageError("the service advertises no model: name one with --model")


def check_capabilities(probe: ServiceProbe) -> str:
    """Find the model among those that the service advertises."""
    models = {m.model_name: m for m in probe.wait(probe.rest.get_server_capabilities()).supported_models}
    expect(probe.model in models, f"{probe.model} is in use but not listed among {len(models)} models")
    context = models[probe.model].max_context_length
    return f"{len(models)} model{'' if len(models) == 1 else 's'}, context of {context or 'unknown length'}"


def check_key(probe: ServiceProbe) -> str:
    """Send a wrong key: it is rejected."""
    try:
        client = tinker.RestClient(base_url=probe.url, api_key="tml-wrong-key-of-rlkit-check")
        client.list_user_checkpoints().result(_QUICK_S)
    except (tinker.AuthenticationError, tinker.PermissionDeniedError) as error:
        return f"a wrong key gets {error.status_code}"
    raise Deviation("a wrong key is accepted")


def check_info(probe: ServiceProbe) -> str:
    """Compare the adapter's description with its request."""
    trainer = probe.fork()
    info = trainer.get_info()
    expect(info.model_data.model_name == probe.model, f"names the model {info.model_data.model_name!r}")
    expect(info.lora_rank in (None, 8), f"lora_rank {info.lora_rank} of an adapter of rank 8")
    expect(":train:" in str(trainer.model_id), f"model_id {trainer.model_id!r} lacks ':train:'")
    return f"rank {info.lora_rank}, tokenizer {info.model_data.tokenizer_id or 'not named'}"


def check_pipeline(probe: ServiceProbe) -> str:
    """Submit gradient, step, gradient, step and a forward pass at once, and the same one by one."""
    adam = types.AdamParams(learning_rate=probe.adam_rate / 2)

    def train(trainer: tinker.TrainingClient) -> None:
        for _ in range(2):
            probe.wait(probe.backward(trainer, probe.datum))
            probe.wait(trainer.optim_step(adam))

    def submit(trainer: tinker.TrainingClient) -> None:
        for _ in range(2):
            probe.backward(trainer, probe.datum)
            trainer.optim_step(adam)

    return expect_close(probe.change(submit), probe.change(train), tolerance=0.02)


def check_order(probe: ServiceProbe) -> str:
    """Send the optimiser step with `seq_id` 2 before the gradient with `seq_id` 1: it waits."""
    adam = types.AdamParams(learning_rate=probe.adam_rate)

    def train(trainer: tinker.TrainingClient) -> None:
        request = OptimStepRequest(optim_params=adam, model_id=str(trainer.model_id), seq_id=2)
        _send(probe, lambda client: client.training.optim_step(request=request))
        time.sleep(0.5)  # time for a service without order to run it
        probe.wait(probe.backward(trainer, probe.datum))
        probe.wait(trainer.optim_step(adam))  # the SDK gives it seq_id 2, so it is the same request

    return expect_close(probe.change(train), probe.change(partial(probe.step, rate=probe.adam_rate)), tolerance=0.02)


def check_retry(probe: ServiceProbe) -> str:
    """Send the gradient with `seq_id` 1 twice before and once after the step: it counts once."""

    def train(trainer: tinker.TrainingClient) -> None:
        body = types.ForwardBackwardInput(data=[probe.datum], loss_fn="cross_entropy")
        request = ForwardBackwardRequest(body, str(trainer.model_id), 1)
        for _ in range(2):
            _send(probe, lambda client: client.training.forward_backward(request=request))
        probe.wait(probe.backward(trainer, probe.datum))  # the SDK gives it seq_id 1
        probe.take_sgd_step(trainer)
        _send(probe, lambda client: client.training.forward_backward(request=request))
        probe.take_sgd_step(trainer)

    def train_once(trainer: tinker.TrainingClient) -> None:
        probe.descend(trainer)
        probe.take_sgd_step(trainer)  # moves by momentum

    return expect_close(probe.change(train), probe.change(train_once), tolerance=0.02)


def check_future(probe: ServiceProbe) -> str:
    """Read the result of a request twice."""
    trainer, adam = probe.fork(), types.AdamParams(learning_rate=probe.adam_rate)
    request = OptimStepRequest(optim_params=adam, model_id=str(trainer.model_id), seq_id=1)
    future = _send(probe, lambda client: client.training.optim_step(request=request))
    probe.wait(trainer.optim_step(adam))  # the SDK gives it seq_id 1, so it waits for the same request

    async def read(client: AsyncTinker) -> bytes:
        body = FutureRetrieveRequest(request_id=future.request_id)
        return await (await client.futures.with_raw_response.retrieve(request=body)).read()

    first, second = (_send(probe, read) for _ in range(2))
    expect(first == second, f"{second} after {first}")
    return "the second answer equals the first"


def check_user_error(probe: ServiceProbe) -> str:
    """Send a token outside of the vocabulary: it fails as the user's error, and the client goes on."""
    trainer = probe.fork()
    try:
        probe.forward(trainer, make_datum([65, 2**31 - 2, 66]))
    except tinker.RequestFailedError as error:
        category = str(getattr(error.category, "value", error.category)).lower()
        expect(category.endswith("user"), f"category {category!r} of a user's error")
        detail = str(translate_error(error, "rejected"))
    except (tinker.BadRequestError, tinker.UnprocessableEntityError) as error:
        detail = f"status {error.status_code}"
    else:
        raise Deviation("a token outside of the vocabulary is accepted")
    expect_close(probe.logprobs(trainer), probe.start_logprobs)
    return detail


def check_context(probe: ServiceProbe) -> str:
    """Ask for more tokens than the context holds: an error, no shorter sample."""
    try:
        (sequence,) = probe.sample(max_tokens=10**8).sequences
    except (tinker.RequestFailedError, tinker.BadRequestError, tinker.UnprocessableEntityError) as error:
        return str(translate_error(error, "rejected"))
    raise Deviation(f"{len(sequence.tokens)} tokens for max_tokens 10^8 without an error")


def check_cancellation(probe: ServiceProbe) -> str:
    """Cancel 64 long samples, and time a short one after them."""
    params = types.SamplingParams(max_tokens=_LONG_TOKENS, stop=[])
    prompt = types.ModelInput.from_ints(probe.text)
    pending = probe.sampler.sample(prompt, 64, params).future()
    time.sleep(3)  # the SDK sends them in the background
    pending.cancel()
    seconds = _time_short_sample(probe)
    expect(seconds <= _QUICK_S, f"a sample of 4 tokens took {seconds:.1f} s after long ones were cancelled")
    return f"a sample of 4 tokens took {seconds:.2f} s"


def check_dead_client(probe: ServiceProbe) -> str:
    """Kill a process that waits for 4 × 64 long samples, and time a short one."""
    command = [sys.executable, "-c", _DEAD_CLIENT, probe.url, probe.model, str(_LONG_TOKENS)]
    client = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "KEY": probe.api_key or ""},
    )
    try:
        assert client.stdout is not None
        expect(client.stdout.readline() == b"started\n", "a second client cannot open a session")
    finally:
        client.kill()
        client.communicate()
    seconds = _time_short_sample(probe)
    expect(seconds <= _DEAD_CLIENT_S, f"a sample of 4 tokens took {seconds:.0f} s beside those of a killed client")
    return f"a sample of 4 tokens took {seconds:.2f} s beside 256 of a killed client"


def _time_short_sample(probe: ServiceProbe) -> float:
    started = time.monotonic()
    probe.sample(max_tokens=4)
    return time.monotonic() - started


def _send[T](probe: ServiceProbe, request: Callable[[AsyncTinker], Awaitable[T]]) -> T:
    """Send a request of the SDK's lower layer, which takes a `seq_id`."""

    async def send() -> T:
        with probe.client.holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            return await request(client)

    return probe.wait(probe.client.holder.run_coroutine_threadsafe(send()))
