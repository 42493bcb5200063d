"""Load to runs: levels, the target, measurement, validity gates, sweeps, the SLO search."""
