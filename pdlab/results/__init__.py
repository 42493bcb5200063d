"""What was measured or simulated, and its files: records, runs, manifests, metrics, the SLO test."""
