"""Dress rehearsal: the real Ray Serve application on made-up GPUs, its engines simulated, time slowed down."""
