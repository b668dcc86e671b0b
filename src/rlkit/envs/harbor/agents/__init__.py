"""Agents of Harbor trials whose model is the policy."""
