"""Faults made on purpose under load, and what became of every request: kills, stops, links, clients that leave."""
