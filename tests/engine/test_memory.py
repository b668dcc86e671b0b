"""Training memory: bounded whatever the batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .tiny_models import write_model

TRAIN = """
import json, resource, sys
from pathlib import Path
import numpy as np
from rlkit.engine.kernels.threads import Lanes
from rlkit.engine.training.learner import Learner
from rlkit.engine.model.lora import LoraSettings, make_adapter
from rlkit.engine.training.losses import make_loss
from rlkit.engine.training.packing import Example
from rlkit.engine.model.weights import load_weights

weights = load_weights(Path(sys.argv[1]), "cpu")
learner = Learner(weights, make_adapter(weights.config, LoraSettings(2), seed=0), Lanes(1))
ones, peaks = np.ones(12, np.float32), []
for count in (500, 10_000):
    tokens = np.random.default_rng(0).integers(0, weights.config.vocab_size, (count, 13))
    examples = [Example(row[:-1], row[1:], {"weights": ones}) for row in tokens]
    assert len(learner.run(examples, make_loss("cross_entropy", {})).logprobs) == count
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(json.dumps(peaks))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ru_maxrss is not in kilobytes")
def test_ten_thousand_datums_take_little_more_memory_than_five_hundred(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", "llama")
    done = subprocess.run([sys.executable, "-c", TRAIN, str(model)], capture_output=True, text=True, check=True)
    few_kb, many_kb = json.loads(done.stdout)
    # The tokens, targets and log-probabilities themselves are 3 MB.
    assert many_kb - few_kb < 100_000
