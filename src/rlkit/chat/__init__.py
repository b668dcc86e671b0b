"""Conversations as tokens: chat formats and their renderers."""
