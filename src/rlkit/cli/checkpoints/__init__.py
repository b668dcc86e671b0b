"""`rlkit checkpoints`."""
