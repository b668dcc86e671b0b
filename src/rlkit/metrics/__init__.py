"""Metrics of steps and evaluations, and findings about a run."""
