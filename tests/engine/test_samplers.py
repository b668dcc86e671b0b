"""Choice of the weights that are sampled from, without HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlkit.engine.decode.decoder import Decoder
from rlkit.engine.decode.kv_cache import kv_bytes
from rlkit.engine.decode.requests import SampleRequest, StopRule
from rlkit.engine.decode.token_sampling import DrawSettings
from rlkit.engine.kernels.devices import batch_limits
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.model.lora import make_sampling_weights
from rlkit.engine.model.weights import load_weights
from rlkit.engine.server.base_models import LoadedBase
from rlkit.engine.server.futures import Promise
from rlkit.engine.server.samplers import Samplers, ServedWeights
from rlkit.engine.server.sessions import SamplerRef, Target


@pytest.fixture
def decoders() -> dict[str, Decoder]:
    """Decoders that `samplers` has created, by the name of the base model."""
    return {}


@pytest.fixture
def samplers(models: Mapping[str, Path], decoders: dict[str, Decoder]) -> Iterator[Samplers]:
    lanes = Lanes(1)
    base = load_weights(models["llama"])
    three = replace(batch_limits(torch.device("cpu")), kv_bytes=3 * kv_bytes(base.config, 64, 4))

    def make(ref: SamplerRef) -> ServedWeights:
        decoders[ref.base_model] = Decoder(make_sampling_weights(base, None, lanes.run), lanes, limits=three)
        return ServedWeights(decoders[ref.base_model], 1, LoadedBase(ref.base_model, models["llama"], base))

    yield Samplers(make, served_bytes=0)
    lanes.close()


def ask(samplers: Samplers, name: str, *, samples: int = 2) -> Promise:
    """A request for samples of 900 tokens."""
    promise = Promise(name)
    request = SampleRequest(np.arange(5), samples, 900, 0, DrawSettings(), StopRule())
    samplers.submit(Target(SamplerRef(name)), request, lambda _: b"", promise)
    return promise


def test_a_finished_request_leaves_the_batch_at_the_next_token(
    samplers: Samplers, decoders: Mapping[str, Decoder]
) -> None:
    first, second, waiting = (ask(samplers, name) for name in "abc")
    samplers.advance()
    assert decoders["a"].busy
    assert decoders.keys() == {"a", "b"}  # there is no room for a third
    for given_up in (first, waiting):
        given_up.fail("cancelled", "user")
    samplers.advance()
    assert not decoders["a"].busy
    assert decoders["b"].busy
    assert decoders.keys() == {"a", "b"}
    second.fail("cancelled", "user")
    samplers.advance()
    assert not samplers.busy


def test_all_weights_share_the_memory_for_keys_and_values(samplers: Samplers, decoders: Mapping[str, Decoder]) -> None:
    for name in "ab":
        ask(samplers, name)
    samplers.advance()
    samplers.advance()
    running = {name: len(decoder._batch) for name, decoder in decoders.items()}
    assert running == {"a": 2, "b": 1}  # three of 64 positions fit
