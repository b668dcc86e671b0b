"""Submission of runs to machines elsewhere."""
