"""Submitting whole runs to machines that are elsewhere."""
