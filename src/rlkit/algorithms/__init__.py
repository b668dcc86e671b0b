"""Reinforcement learning itself: advantages, losses, penalties, training data."""
