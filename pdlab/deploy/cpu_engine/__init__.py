"""Code that runs inside vLLM engines on CPUs, and the tiny model that they serve."""
