"""Facts of nodes to findings: what would make KV transfers slow or wrong; pure."""
