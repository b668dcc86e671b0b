"""Runners of a model's programs."""
