"""A model: its files, weights, adapters and forward pass."""
