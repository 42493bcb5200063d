"""Whole experiments from a file: schedule, launch, sweep, resume."""
