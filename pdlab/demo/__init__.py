"""The demo: deployments of a tiny model on this machine, a short sweep of each, one plot."""
