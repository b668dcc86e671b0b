"""Several adapters through one server: which weights a sampler has, and that none of them can be ruined."""

from __future__ import annotations

import numpy as np
import pytest
import tinker
from tinker import types

from .helpers import ce_datum, prompt

TEXT = list(b"the cat sat on the mat")


def test_weights_saved_again_under_a_name_are_the_new_ones(
    client: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    found: list[list[float]] = []
    for _ in range(2):
        path = trainer.save_weights_for_sampler("a").result().path
        sampler = client.create_sampling_client(path).result()
        found.append(sampler.compute_logprobs(prompt(*TEXT)).result()[1:])
        rest.delete_checkpoint_from_tinker_path(path).result()
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
    assert np.abs(np.array(found[0]) - np.array(found[1])).max() > 0.01


def test_many_adapters_at_once_wait_for_each_other_and_are_all_answered(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    samplers: list[tinker.SamplingClient] = []
    for _ in range(6):
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.05)).result()
        samplers.append(trainer.save_weights_and_get_sampling_client().result())
    params = types.SamplingParams(max_tokens=20, seed=1, stop=[])
    together = [sampler.sample(prompt(*TEXT), 1, params) for sampler in samplers]
    answers = [future.result().sequences[0].tokens for future in together]
    assert answers == [s.sample(prompt(*TEXT), 1, params).result().sequences[0].tokens for s in samplers]


def test_settings_that_would_ruin_the_weights_are_refused(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client(base_model="llama", rank=4, seed=0).result()
    for adam in (types.AdamParams(eps=0.0), types.AdamParams(learning_rate=1e30)):
        trainer.forward_backward([ce_datum(TEXT)], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match="optim_step"):
            trainer.optim_step(adam).result()
    assert np.isfinite(trainer.forward([ce_datum(TEXT)], "cross_entropy").result().metrics["loss:sum"])
