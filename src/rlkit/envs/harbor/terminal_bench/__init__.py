"""Datasets of terminal-bench 1: its registry, git checkouts, and their tasks as tasks of Harbor."""
