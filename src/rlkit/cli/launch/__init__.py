"""`rlkit launch`."""
