"""Metrics of steps and evaluations, and what they say about a run."""
