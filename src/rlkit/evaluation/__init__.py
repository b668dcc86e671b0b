"""Evaluation of a model or a checkpoint, and its scores."""
