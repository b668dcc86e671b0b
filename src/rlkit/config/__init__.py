"""Configurations: load, validate and describe a `Config` from YAML files, the command line and Python."""
