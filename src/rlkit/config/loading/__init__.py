"""From YAML files and overrides to a checked configuration."""
