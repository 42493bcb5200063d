"""Runs to curves to comparisons with intervals: normalisation, frontier, crossovers, goodput."""
