"""Files of the engine: checkpoints, snapshots, adapters."""
