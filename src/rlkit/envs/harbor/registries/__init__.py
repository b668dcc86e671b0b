"""Registries of datasets."""
