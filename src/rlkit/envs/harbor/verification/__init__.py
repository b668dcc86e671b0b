"""Verification that the agent cannot reach."""
