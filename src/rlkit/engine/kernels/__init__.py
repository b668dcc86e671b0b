"""Compiled computation for this processor."""
