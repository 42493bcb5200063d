"""Marks of a request's timeline, and the parts of its time between them. Standard library only."""
