"""Lexer of answers."""
