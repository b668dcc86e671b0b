"""Tasks of a run: sources that draw them, curricula, decontamination."""
