"""Judges: models that grade what no program can grade, inside an environment."""
