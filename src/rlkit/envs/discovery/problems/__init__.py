"""Verifiers and local searches of open problems."""
