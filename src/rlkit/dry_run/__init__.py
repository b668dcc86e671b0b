"""Dry runs: everything before the first paid request."""
