"""Tools for runs: doctor, audit, checkpoints, export, scaffold."""
