"""Which replica goes to which node, and why a deployment does not fit; pure."""
