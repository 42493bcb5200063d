"""Sent by value to nodes that have no pdlab: facts, interfaces, installation, logs; standard library only."""
