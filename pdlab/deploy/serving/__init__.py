"""What runs in Ray Serve's replicas in front of the engines: builders, guard, one request per sequence, calls of
prefill, drain."""
