"""Sampling in the engine: continuous batching, the key/value cache, token sampling."""
