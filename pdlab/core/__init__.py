"""Values that every package shares: deployments, workloads, nodes, models, errors, files, text; no I/O but YAML."""
