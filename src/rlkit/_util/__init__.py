"""Helpers that know nothing of reinforcement learning: files, threads, seeds, clocks, redaction."""
