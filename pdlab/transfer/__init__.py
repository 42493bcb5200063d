"""Proof of the KV transfer: ranks that move coded blocks, the wire that was used, the verdict."""
