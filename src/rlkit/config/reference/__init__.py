"""The configuration described, for editors and people."""
