"""Values that all packages share: deployments, workloads, nodes, models, errors. Its only I/O is to read files."""
