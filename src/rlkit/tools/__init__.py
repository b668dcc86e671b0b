"""Tools around runs: doctor, audit, export, scaffold."""
