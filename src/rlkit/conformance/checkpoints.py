"""Checks of saved weights: resumption, and samplers that keep their weights."""

from __future__ import annotations

import numpy as np
import tinker

from rlkit.conformance.objectives import Values
from rlkit.conformance.probe import Deviation, ServiceProbe, expect, expect_close

_CHANGE_TOLERANCE = 0.3
"""Relative tolerance of a change of 0.1 nats or more, which leaves room for the noise of bfloat16."""


def check_resumption(probe: ServiceProbe) -> str:
    """Save after a step, load with the optimiser, and take a step by momentum alone in both."""
    trainer, path = _train_and_save(probe)
    loaded = probe.wait(probe.client.create_training_client_from_state_with_optimizer(path))
    _expect_same_change(probe, probe.logprobs(loaded), trainer)
    changes = [_move_by_momentum(probe, client) for client in (trainer, loaded)]
    return f"next step by momentum: {expect_close(changes[1], changes[0])}"


def check_fresh_optimiser(probe: ServiceProbe) -> str:
    """Load without the optimiser: there is no momentum."""
    _, path = _train_and_save(probe)
    loaded = probe.wait(probe.client.create_training_client_from_state(path))
    moved = float(np.abs(_move_by_momentum(probe, loaded)).max())
    expect(moved < 0.02, f"moves by {moved:.2g} nats in a step without a gradient")
    return f"moves by {moved:.1g} nats in a step without a gradient"


def check_snapshots(probe: ServiceProbe) -> str:
    """Train on after a sampler was made: it does not move, and the next one does."""
    trainer = probe.fork()
    probe.step(trainer, rate=probe.adam_rate)
    sampler = probe.wait(trainer.save_weights_and_get_sampling_client())
    before = probe.score(sampler)
    _expect_same_change(probe, before, trainer)
    probe.step(trainer, rate=probe.adam_rate)
    newer = probe.score(probe.wait(trainer.save_weights_and_get_sampling_client()))
    expect(np.abs(newer - before).max() > 0.02, "a sampler made after a step has the weights before it")
    moved = float(np.abs(probe.score(sampler) - before).max())
    expect(moved < 0.02, f"a sampler moved by {moved:.2g} nats with later weights")
    return f"moved by {moved:.1g} nats; {_expect_same_change(probe, newer, trainer)}"


def check_named_weights(probe: ServiceProbe) -> str:
    """Save sampler weights under a name, and sample from their path."""
    trainer = probe.fork()
    probe.step(trainer, rate=probe.adam_rate)
    path = probe.save_sampler(trainer)
    expect(path.startswith("tinker://") and "/sampler_weights/" in path, f"path {path!r}")
    sampler = probe.wait(probe.client.create_sampling_client(model_path=path))
    return _expect_same_change(probe, probe.score(sampler), trainer)


def check_inflight(probe: ServiceProbe) -> str:
    """Publish weights to an in-flight sampler: it takes them over."""
    trainer = probe.fork()
    sampler = probe.wait(trainer.save_weights_and_get_sampling_client(kind="inflight"))
    before = probe.score(sampler)
    probe.step(trainer, rate=probe.adam_rate)
    probe.wait(trainer.save_weights_and_get_sampling_client(kind="inflight"))
    change = float(np.abs(probe.score(sampler) - before).max())
    expect(change > 0.02, "an in-flight sampler keeps its old weights")
    return f"changes by {change:.2g} nats"


def check_management(probe: ServiceProbe) -> str:
    """List a checkpoint, set its time to live, describe and delete it."""
    trainer, path = _train_and_save(probe)
    probe.wait(probe.rest.set_checkpoint_ttl_from_tinker_path(path, 7200))
    info = probe.wait(probe.rest.get_weights_info_by_tinker_path(path))
    expect(info.base_model == probe.model, f"weights_info names {info.base_model!r}")
    run = str(trainer.model_id)

    def names() -> list[str]:
        return [checkpoint.tinker_path for checkpoint in probe.wait(probe.rest.list_checkpoints(run)).checkpoints]

    expect(path in names(), "a saved checkpoint is not listed")
    probe.wait(probe.rest.delete_checkpoint_from_tinker_path(path))
    expect(path not in names(), "a deleted checkpoint is listed")
    try:
        probe.wait(probe.client.create_training_client_from_state(path))
    except tinker.TinkerError:
        return "listed, described, deleted"
    raise Deviation("a deleted checkpoint can be loaded")


def _train_and_save(probe: ServiceProbe) -> tuple[tinker.TrainingClient, str]:
    trainer = probe.fork()
    probe.step(trainer, rate=probe.adam_rate)
    return trainer, probe.save_state(trainer)


def _expect_same_change(probe: ServiceProbe, logprobs: Values, trainer: tinker.TrainingClient) -> str:
    """Compare changes since the start, which log-probabilities themselves would hide."""
    start = probe.start_logprobs
    return expect_close(logprobs - start, probe.logprobs(trainer) - start, tolerance=_CHANGE_TOLERANCE)


def _move_by_momentum(probe: ServiceProbe, trainer: tinker.TrainingClient) -> Values:
    """Return the change by a step without a gradient."""
    before = probe.logprobs(trainer)
    probe.step(trainer, probe.zero_datum, rate=probe.adam_rate)
    return probe.logprobs(trainer) - before
