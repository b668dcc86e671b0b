"""Open problems: their verifiers and local searches."""
