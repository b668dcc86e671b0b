"""Conversations as tokens: chat formats, renderers, tokenizers."""
