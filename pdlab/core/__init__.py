"""Values that every package shares: deployments, workloads, nodes, models, errors; reads YAML and lengths alone."""
