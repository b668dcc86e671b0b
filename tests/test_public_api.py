from __future__ import annotations

import json
import subprocess
import sys

import rlkit
from rlkit.config.schema.keywords import Settings

HEAVY = ("torch", "transformers", "tinker", "tinker_cookbook", "harbor", "openreward", "wandb")

IMPORT = """
import json, sys
from pathlib import Path
before = set(sys.modules)
import rlkit
loaded = set(sys.modules) - before
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
peak_mib = int(status["VmHWM"].split()[0]) / 1024
print(json.dumps({"loaded": len(loaded), "peak_mib": peak_mib, "modules": sorted(sys.modules)}))
"""


def test_public_names_are_sorted_and_importable() -> None:
    assert rlkit.__all__ == sorted(rlkit.__all__)
    for name in rlkit.__all__:
        assert getattr(rlkit, name) is not None
    assert set(rlkit.__all__) == set(rlkit._HOME)


def test_importing_rlkit_is_cheap_and_loads_no_heavy_library() -> None:
    completed = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    report = json.loads(completed.stdout)
    assert not [name for name in HEAVY if name in report["modules"]]
    assert report["loaded"] <= 60  # numpy alone would be twice as many
    assert report["peak_mib"] <= 60


def test_the_loop_loads_nothing_that_computes() -> None:
    # A run on a hosted service needs no kernels; compiling packages take longer to import than rlkit.
    code = "import json, sys, rlkit.training.trainer, rlkit.tinker_client.sdk; print(json.dumps(sorted(sys.modules)))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = json.loads(completed.stdout)
    assert not [name for name in ("numba", "transformers", "rlkit.engine.kernels") if name in modules]


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(rlkit, "nonsense")


def test_train_takes_each_field_of_the_configuration_as_a_keyword() -> None:
    keywords = {*Settings.__annotations__, "envs", "advantage", "loss"}
    assert keywords == set(rlkit.Config.model_fields)
