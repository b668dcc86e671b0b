"""`rlkit tasks`."""
