"""Harbor: its tasks, its agent, and sandboxes for them."""

import os

# Read when Harbor's agents are imported, which would otherwise ask the network for a table of prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
