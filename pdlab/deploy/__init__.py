"""A Deployment to a served and checked application: flags, Serve config, launch, canary, counters."""
