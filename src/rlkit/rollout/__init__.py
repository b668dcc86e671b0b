"""Rollouts: playing environments with a policy, and recording every token."""
