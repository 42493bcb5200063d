"""The load generator: vLLM's own benchmark code in processes of its own."""
