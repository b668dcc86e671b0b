"""Test of the embedded engine with a tiny random model: `python -m rlkit.tools.engine_probe`.

Invariant: the last line of output is the current stage, or the reason for the failure; never a traceback.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Start the engine, sample through the Tinker SDK, and return the exit code."""
    try:
        _report("loading torch and the Tinker SDK")
        import tinker

        from rlkit.engine import EngineServer
        from rlkit.testing import byte_model

        with tempfile.TemporaryDirectory(prefix="rlkit-doctor-", ignore_cleanup_errors=True) as folder:
            model = byte_model(Path(folder) / "model")
            _report("starting the engine; the first start compiles its kernels, which takes minutes on a busy machine")
            with EngineServer(resolve=lambda _: model, root=Path(folder) / "engine") as server:
                client = tinker.ServiceClient(base_url=server.url, api_key=server.api_key)
                sampler = client.create_sampling_client(base_model=str(model)).result()
                prompt = tinker.ModelInput.from_ints([104, 105])
                parameters = tinker.SamplingParams(max_tokens=4, seed=0)
                response = sampler.sample(prompt, num_samples=1, sampling_params=parameters).result()
                client.close("success").result()
        if response.sequences[0].tokens:
            return 0
        _report("the engine returned an empty sample")
    except Exception as error:  # a broken installation may raise anything
        text = (str(error).strip().splitlines() or [""])[0]
        _report(f"{type(error).__name__}: {text}".rstrip(": "))
    return 1


def _report(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
