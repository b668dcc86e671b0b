from __future__ import annotations

import os

from tests.sandbox.conftest import cache, can_sandbox, sandbox_cache

# Read when Harbor's agents are imported: without it, that asks the network for a table of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["HARBOR_TELEMETRY"] = "0"

__all__ = ["cache", "can_sandbox", "sandbox_cache"]
