"""Values that every package shares: deployments, workloads, nodes, models, errors, text; reads YAML and lengths alone."""
